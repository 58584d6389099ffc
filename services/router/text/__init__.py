"""Converts between text and tokens: tokenizers, chat templates, sampling parameters, and the text of an answer."""

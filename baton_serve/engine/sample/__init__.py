"""Turns logits into tokens: sampling, penalties, token masks and grammars."""

"""Scans generated text one character at a time, so that the result does not depend on how a stream was split."""

"""Unmodified clients against a running server: each script asks, checks what it gets, and ends with status 0."""

"""The plain-torch twin of every kernel: specification, oracle and fallback."""

"""The plain-torch twin of every kernel: its specification, its test oracle and its fallback."""

"""The cores of this host, and which instance computes on which of them."""

"""How several instances on one host share its CPU cores: affinity, nice levels and time slices."""

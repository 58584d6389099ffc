"""How several instances share the cores of one host."""

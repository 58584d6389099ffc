"""Finds the CPU cores of this host, and distributes them among instances."""

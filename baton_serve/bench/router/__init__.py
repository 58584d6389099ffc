"""Benchmarks of the router alone, before faked instances."""

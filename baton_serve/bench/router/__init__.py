"""Benchmarks of the router alone, with fake instances."""

"""Benchmarks of block transfer."""

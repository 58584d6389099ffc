"""Benchmarks of whole clusters, and their peers."""

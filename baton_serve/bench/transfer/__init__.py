"""Benchmarks of KV block transfer between processes."""

"""Benchmarks of whole clusters through their HTTP API, and the same load on other servers."""

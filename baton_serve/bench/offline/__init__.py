"""Benchmarks of `LLM`, without a server: latency, throughput and the accuracy of answers."""

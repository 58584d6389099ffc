"""Benchmarks of single parts: kernels, engine, grammars, weight loading."""

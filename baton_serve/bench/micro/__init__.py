"""Benchmarks of single components without a server: kernels, engine, grammars, weight loading."""

"""Quantized weights as modules of a model: formats, rounding while loading, and experts."""

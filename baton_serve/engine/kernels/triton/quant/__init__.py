"""Triton matrix products over quantized weights."""

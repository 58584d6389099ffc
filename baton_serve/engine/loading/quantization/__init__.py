"""Loads quantized weights: rounded while loading, or as checkpoints store them. Kernels are in engine.kernels."""

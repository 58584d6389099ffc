"""Weights in few bits: made while loading, or read from checkpoints that hold them. Kernels are in engine.kernels."""

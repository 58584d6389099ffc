"""Weights in few bits: made while loading, or read from checkpoints that hold them. Kernels are in engine.kernels."""

from engine.quantization.modules import QuantizedEmbedding, QuantizedLinear, ReorderedLinear, can_merge, install, merge

__all__ = ["QuantizedEmbedding", "QuantizedLinear", "ReorderedLinear", "can_merge", "install", "merge"]

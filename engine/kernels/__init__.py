"""The engine's kernels: one port each, one backend per device, a plain-torch twin that says what is right."""

from engine.kernels.metadata import (
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    Experts,
    LayerKernels,
    Weight,
)
from engine.kernels.quantized import QuantizedWeight
from engine.kernels.selection import argmax_kernel, attention_backend, layer_kernels

__all__ = [
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionSpec",
    "Experts",
    "LayerKernels",
    "QuantizedWeight",
    "Weight",
    "argmax_kernel",
    "attention_backend",
    "layer_kernels",
]

"""The engine's kernels. Each kind has an interface, a backend for each type of device, and a plain-torch twin that
specifies the right result.
"""

from baton_serve.engine.kernels.metadata import (
    Activations,
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    Experts,
    LayerKernels,
    Linear,
    NewHeads,
    Norm,
    Weight,
)
from baton_serve.engine.kernels.quantized import QuantizedWeight, StackedWeight
from baton_serve.engine.kernels.selection import argmax_kernel, attention_backend, layer_kernels, row_kernel

__all__ = [
    "Activations",
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionSpec",
    "Experts",
    "LayerKernels",
    "Linear",
    "NewHeads",
    "Norm",
    "QuantizedWeight",
    "StackedWeight",
    "Weight",
    "argmax_kernel",
    "attention_backend",
    "layer_kernels",
    "row_kernel",
]

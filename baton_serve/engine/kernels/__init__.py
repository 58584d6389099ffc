"""Kernels of the engine: each kind has an interface, a backend for each type of device, and a plain-torch twin that
specifies the right result.
"""

from baton_serve.engine.kernels.interfaces import (
    GROUP_ROWS,
    Activations,
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    Experts,
    LayerKernels,
    Linear,
    NewHeads,
    Norm,
    PackedWeight,
    SlotRows,
    SlotWeights,
    Weight,
    no_work,
)
from baton_serve.engine.kernels.mixers import (
    ChannelDeltaHeads,
    DeltaHeads,
    LatentRows,
    LightningHeads,
    MixerKernels,
    PackedSequences,
    ScanChannels,
    StateSpaceHeads,
    StateSpaceShapes,
)
from baton_serve.engine.kernels.quantized_weights import QuantizedWeight, StackedWeight
from baton_serve.engine.kernels.selection import (
    adapter_kernels,
    argmax_kernel,
    attention_backend,
    layer_kernels,
    row_kernel,
)

__all__ = [
    "GROUP_ROWS",
    "Activations",
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionSpec",
    "ChannelDeltaHeads",
    "DeltaHeads",
    "Experts",
    "LatentRows",
    "LayerKernels",
    "LightningHeads",
    "Linear",
    "MixerKernels",
    "NewHeads",
    "Norm",
    "PackedSequences",
    "PackedWeight",
    "QuantizedWeight",
    "ScanChannels",
    "SlotRows",
    "SlotWeights",
    "StackedWeight",
    "StateSpaceHeads",
    "StateSpaceShapes",
    "Weight",
    "adapter_kernels",
    "argmax_kernel",
    "attention_backend",
    "layer_kernels",
    "no_work",
    "row_kernel",
]

"""Lists the candidate kernels of a device and dtype, the preferred first; `proved_kernels.py` makes the final
choice.
"""

import ctypes
import importlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from baton_serve.engine.kernels.cpu.attention import CpuAttention
from baton_serve.engine.kernels.cpu.build import KernelsUnavailableError, load_kernels
from baton_serve.engine.kernels.cpu.decoder_proof import DecoderKernel, PackedDecoder
from baton_serve.engine.kernels.cpu.layers import DTYPE_CODES, CpuLayers
from baton_serve.engine.kernels.cpu.linear import has_packed_linear
from baton_serve.engine.kernels.cpu.mixers import CpuMixers
from baton_serve.engine.kernels.interfaces import (
    AdapterKernels,
    AttentionBackend,
    AttentionSpec,
    LayerKernels,
    RowKernel,
    RowLayer,
)
from baton_serve.engine.kernels.library_kernels import LibraryAttention, PackageLayers, has_package
from baton_serve.engine.kernels.mixers import MixerKernels
from baton_serve.engine.kernels.proved_kernels import KernelCandidates
from baton_serve.engine.kernels.prover import KernelCandidate
from baton_serve.engine.kernels.reference import layers as reference_layers
from baton_serve.engine.kernels.reference.attention import ReferenceAttention

logger = logging.getLogger(__name__)


def kernel_candidates(device: torch.device, dtype: torch.dtype) -> KernelCandidates:
    """Return the kernels that an engine may use on a device, before they are compared with plain torch: Baton's own,
    and on accelerators those of libraries. Call it once for an engine, as it may compile kernels.
    """
    own_attention, own_layers = attention_backend(device, dtype), layer_kernels(device, dtype)
    name = "C++" if device.type == "cpu" else "Triton"
    has_own_attention = not isinstance(own_attention, ReferenceAttention)
    attention = [KernelCandidate(name, lambda: own_attention)] if has_own_attention else []
    layers = [KernelCandidate(name, lambda: own_layers)] if own_layers is not reference_layers else []
    if device.type == "cpu":
        can_decode = isinstance(own_layers, CpuLayers) and dtype == torch.bfloat16
        library = own_layers.library if isinstance(own_layers, CpuLayers) else None
        if library is not None and can_decode and has_packed_linear(library):
            decoders: tuple[KernelCandidate[DecoderKernel], ...] = (
                KernelCandidate(name, lambda: PackedDecoder(library)),
            )
            return KernelCandidates(tuple(attention), tuple(layers), (), decoders, _cpu_mixers(library))
        return KernelCandidates(tuple(attention), tuple(layers), mixers=() if library is None else _cpu_mixers(library))
    prompts = frozenset({"prefill attention", "mixed attention"})
    attention.append(KernelCandidate("SDPA", LibraryAttention, prompts, is_last=True))
    if has_package():
        layers.append(KernelCandidate("vllm-xpu-kernels", _package_layers, frozenset({"norm", "gate"})))
    own_argmax = argmax_kernel(device)
    argmax = () if own_argmax is reference_layers.argmax else (KernelCandidate(name, lambda: own_argmax),)
    has_triton = importlib.util.find_spec("triton") is not None
    mixers: tuple[KernelCandidate[MixerKernels], ...] = (KernelCandidate(name, _triton_mixers),) if has_triton else ()
    return KernelCandidates(tuple(attention), tuple(layers), argmax, mixers=mixers)


def _cpu_mixers(library: ctypes.CDLL) -> tuple[KernelCandidate[MixerKernels], ...]:
    return (KernelCandidate("C++", lambda: CpuMixers(library)),)


def _triton_mixers() -> MixerKernels:
    mixers: MixerKernels = importlib.import_module("baton_serve.engine.kernels.triton.mixers")
    return mixers


def _package_layers() -> LayerKernels:
    # It has two of the operations, and is asked for these only.
    return cast(LayerKernels, PackageLayers())


def attention_backend(device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """Return Baton's fastest attention implementation for a device. Call it once for an engine: it may compile kernels,
    and it logs a warning if only the slow implementation in plain torch (the twin) is available.
    """
    if device.type == "cpu":
        return _cpu_attention(dtype)
    if importlib.util.find_spec("triton") is None:
        logger.warning(
            "Triton is not installed: attention on %s runs in plain torch, which is slow. Install the "
            "Triton of this build of torch",
            device.type,
        )
        return ReferenceAttention()
    backend: AttentionBackend = importlib.import_module("baton_serve.engine.kernels.triton.attention").TritonAttention(
        device
    )
    return backend


def layer_kernels(device: torch.device, dtype: torch.dtype) -> LayerKernels:
    """Return Baton's fastest implementation of `LayerKernels` for a device; plain torch if nothing faster exists. Call
    it once for an engine, after `attention_backend`, which logs the warning for both.
    """
    if device.type != "cpu":
        return _triton_layers()
    if dtype not in DTYPE_CODES:
        return reference_layers
    try:
        return CpuLayers(load_kernels(), dtype)
    except KernelsUnavailableError:
        return reference_layers


def row_kernel(
    device: torch.device, layers: Sequence[RowLayer], specs: Sequence[AttentionSpec], head_dim: int, kv_heads: int
) -> RowKernel | None:
    """Return a kernel that computes all layers of a decoder for a step of one token. Return None if this device or
    model has no such kernel that is known to be safe and faster than separate kernels.
    """
    if device.type == "cpu" or importlib.util.find_spec("triton") is None:
        return None
    module = importlib.import_module("baton_serve.engine.kernels.triton.persistent.launch")
    made: RowKernel | None = module.row_layers(layers, specs, head_dim, kv_heads)
    return made


def adapter_kernels(device: torch.device) -> AdapterKernels:
    """Return the kernels that add the products of LoRA adapters: Triton's on accelerators that have it, otherwise plain
    torch.
    """
    if device.type == "cpu" or importlib.util.find_spec("triton") is None:
        return reference_layers
    kernels: AdapterKernels = importlib.import_module("baton_serve.engine.kernels.triton.lora")
    return kernels


def argmax_kernel(device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the device's function that writes the column of each row's largest logit to a tensor: (logits [rows,
    columns], out int64 [rows]) -> out.
    """
    if device.type == "cpu" or importlib.util.find_spec("triton") is None:
        return reference_layers.argmax
    kernel: Callable[[Tensor, Tensor], Tensor] = importlib.import_module(
        "baton_serve.engine.kernels.triton.argmax"
    ).argmax
    return kernel


def _triton_layers() -> LayerKernels:
    if importlib.util.find_spec("triton") is None:
        return reference_layers
    layers: LayerKernels = importlib.import_module("baton_serve.engine.kernels.triton.layers")
    return layers


def _cpu_attention(dtype: torch.dtype) -> AttentionBackend:
    if dtype not in DTYPE_CODES:
        return ReferenceAttention()
    try:
        return CpuAttention(load_kernels())
    except KernelsUnavailableError as error:
        logger.warning(
            "Attention on the CPU runs in plain torch, which is slow: %s. Install g++ to build the kernels", error
        )
        return ReferenceAttention()

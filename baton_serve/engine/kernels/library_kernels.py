"""Wraps kernels of libraries: torch's own attention (SDPA), and Intel's package `vllm-xpu-kernels` if it is installed.

They are candidates beside Baton's kernels, for devices only. The package is never required, and only detected. Its
kernels for other layouts of the KV cache or of weights are not used.
"""

import importlib
import importlib.util
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from baton_serve.engine.kernels import quantized_kv
from baton_serve.engine.kernels.interfaces import AttentionMetadata, AttentionSpec, NewHeads
from baton_serve.engine.kernels.reference.attention import ReferenceAttention

PACKAGE = "vllm_xpu_kernels"


class LibraryAttention:
    """Implements `AttentionBackend` with torch's `scaled_dot_product_attention` for chunks of prompts, over K and V
    that are gathered from their blocks. Plain torch (the twin) does everything else.

    It reads the lengths of sequences on the host, so graphs cannot capture it.
    """

    def __init__(self) -> None:
        self._twin = ReferenceAttention()

    def store(self, key: Tensor, value: Tensor, cache: Tensor, meta: AttentionMetadata) -> None:
        self._twin.store(key, value, cache, meta)

    def attend(self, query: Tensor, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec) -> Tensor:
        has_own_rules = any(rule is not None for rule in (spec.softcap, spec.sinks, spec.alibi, spec.value_dim))
        if meta.max_query_len <= 1 or has_own_rules:
            return self._twin.attend(query, cache, meta, spec)
        output = torch.empty_like(query)
        lengths = meta.context_lens.tolist()
        for sequence, (start, end) in enumerate(pairwise(meta.query_starts.tolist())):
            if end > start:
                table = meta.block_tables[sequence]
                ends = None if meta.seen_ends is None else meta.seen_ends[start:end, None]
                output[start:end] = _attend_one(query[start:end], cache, lengths[sequence], table, spec, ends)
        return output

    def attend_new(self, new: NewHeads, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec) -> Tensor | None:
        return None


def _attend_one(
    query: Tensor, cache: Tensor, length: int, table: Tensor, spec: AttentionSpec, seen_ends: Tensor | None
) -> Tensor:
    """Return attention of one sequence for its new tokens, [num_tokens, num_heads, head_dim]. The sequence has `length`
    tokens in the KV blocks `table`. `seen_ends`, [num_tokens, 1], are those of `AttentionMetadata`.
    """
    blocks = quantized_kv.read(cache, table[: -(-length // cache.shape[3])].long())
    keys, values = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length].to(query.dtype).unbind(0)
    positions = torch.arange(length - len(query), length, device=query.device)[:, None]
    kv_positions = torch.arange(length, device=query.device)[None, :]
    # Not `is_causal`: it aligns a chunk with the first keys, and a chunk lies at the end of its context.
    visible = kv_positions <= positions if seen_ends is None else kv_positions < seen_ends
    if spec.sliding_window is not None:
        visible &= kv_positions > positions - spec.sliding_window
    # `enable_gqa` has no fast kernel on some devices.
    group = query.shape[1] // keys.shape[0]
    found = functional.scaled_dot_product_attention(
        query.transpose(0, 1),
        keys.repeat_interleave(group, dim=0),
        values.repeat_interleave(group, dim=0),
        attn_mask=visible,
        scale=spec.scale,
    )
    return found.transpose(0, 1)


class PackageLayers:
    """The operations of `LayerKernels` that the package `vllm-xpu-kernels` also has: RMSNorm, and SiLU(gate) * up."""

    def __init__(self, import_module: Callable[[str], Any] = importlib.import_module) -> None:
        """Import `vllm-xpu-kernels`, which registers its operations with torch. Raises whatever this import raises."""
        import_module(f"{PACKAGE}._C")
        self._operations: Any = torch.ops._C

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        *,
        residual: Tensor | None = None,
        unit_offset: bool = False,
    ) -> Tensor:
        scale = 1.0 + weight if unit_offset else weight
        if residual is None:
            output = torch.empty_like(x)
            self._operations.rms_norm(output, x.contiguous(), scale, eps)
            return output
        # The operation overwrites its input with the norm, and the residual with the sum.
        output = x.clone()
        self._operations.fused_add_rms_norm(output, residual, scale, eps)
        return output

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        output = gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))
        self._operations.silu_and_mul(output, gate_up.contiguous())
        return output


def has_package() -> bool:
    """Return whether `vllm-xpu-kernels` is installed."""
    return importlib.util.find_spec(PACKAGE) is not None

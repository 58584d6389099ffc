"""Chooses the Triton kernel and tile sizes of paged attention for a step: decode, prefill, latent; and launches it.
This module chooses tile sizes and launches kernels; it has no device code.

Nothing here waits for the device or reads a tensor's value, so that everything can be captured in a graph. Sequences
with one new token always use the decode kernel, whatever else is in their batch, so that the cut of a context depends
on this context only.
"""

import torch
from torch import Tensor

from baton_serve.engine.kernels.interfaces import AttentionMetadata, AttentionSpec, NewHeads
from baton_serve.engine.kernels.quantized_kv import is_coded
from baton_serve.engine.kernels.reference.attention import ReferenceAttention
from baton_serve.engine.kernels.triton import latent
from baton_serve.engine.kernels.triton.decode import decode
from baton_serve.engine.kernels.triton.decode_new import decode_new, fits
from baton_serve.engine.kernels.triton.kv_store import store
from baton_serve.engine.kernels.triton.prefill import prefill
from baton_serve.engine.kernels.triton.tiles import (
    WIDE_HEAD,
    DecodeTiles,
    DeviceLimits,
    PrefillTiles,
    decode_tiles,
    device_limits,
    fits_heads,
    latent_tiles,
    padded,
    prefill_tiles,
)

MAX_HEAD_DIM = 512
"""Largest head dimension of the kernels. The plain-torch twin computes wider heads, and also ALiBi, on any device.
Latent attention has kernels of its own.
"""
MAX_NEW_HEAD_DIM = 256
"""Largest head dimension of the kernel that also prepares new heads."""
MAX_STORED_DIM = 1024
"""Largest row of a head that `store` writes."""


class TritonAttention:
    """Implements `AttentionBackend` by Triton kernels. Plain torch (the twin) computes what they do not support.

    Each block of a cache view must be contiguous. Padding sequences of a graph have a context length of 0, and its
    padding tokens have negative slots.
    """

    def __init__(self, device: torch.device | None = None, *, limits: DeviceLimits | None = None) -> None:
        """Create the backend for a device; None: the current accelerator. `limits` are the device's limits for tile
        sizes; None: they are queried.
        """
        if limits is None:
            device = device or torch.accelerator.current_accelerator()
            limits = device_limits((device and device.index) or 0)
        self._limits = limits
        self._twin = ReferenceAttention()

    def store(self, key: Tensor, value: Tensor, cache: Tensor, meta: AttentionMetadata) -> None:
        if key.shape[2] > MAX_STORED_DIM or _splits_rows(cache):
            self._twin.store(key, value, cache, meta)
            return
        store(key, value, cache, meta.slots)

    def attend(self, query: Tensor, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec) -> Tensor:
        if _has_one_plane(cache) and latent.fits(cache, spec) and not _splits_rows(cache):
            return self._attend_latents(query, cache, meta, spec)
        if spec.alibi is not None or _has_one_plane(cache) or not self._fits(query, cache) or _splits_rows(cache):
            return self._twin.attend(query, cache, meta, spec)
        decoding, prefilling = self.tiles(query, cache, meta.context_lens.shape[0])
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        has_singles = _has_singles(query, meta)
        if meta.max_query_len > 1:
            prefill(output, query, cache, meta, spec, prefilling, skip_singles=has_singles)
        if has_singles:
            decode(output, query, cache, meta, spec, decoding)
        return output

    def _attend_latents(self, query: Tensor, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec) -> Tensor:
        token_bytes = cache.shape[4] * query.element_size()
        assert spec.value_dim is not None
        are_halved = spec.value_dim == latent.MAX_VALUE_DIM and query.element_size() == 2 and not is_coded(cache)
        decoding, prefilling = latent_tiles(
            self._limits, token_bytes, meta.context_lens.shape[0], cache.shape[3], are_halved=are_halved
        )
        output = query.new_empty(*query.shape[:2], spec.value_dim)
        has_singles = _has_singles(query, meta)
        if meta.max_query_len > 1:
            latent.prefill_latents(output, query, cache, meta, spec, prefilling, skip_singles=has_singles)
        if has_singles:
            latent.decode_latents(output, query, cache, meta, spec, decoding)
        return output

    def attend_new(self, new: NewHeads, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec) -> Tensor | None:
        if spec.alibi is not None or _has_one_plane(cache) or cache.shape[4] > MAX_NEW_HEAD_DIM or _splits_rows(cache):
            return None
        # The programs of this kernel need more registers, so fewer of them share a processor: it slows large batches.
        if not fits(new, cache, meta) or len(new.heads) * cache.shape[2] > self._limits.processors:
            return None
        return decode_new(new, cache, meta, spec, self.tiles(new.heads, cache, len(new.heads))[0])

    def _fits(self, query: Tensor, cache: Tensor) -> bool:
        """Return whether the kernels support heads of this size, which need memory of the device."""
        if query.shape[2] > MAX_HEAD_DIM:
            return False
        head_bytes, group = padded(query.shape[2]) * query.element_size(), query.shape[1] // cache.shape[2]
        return query.shape[2] <= WIDE_HEAD or fits_heads(self._limits, head_bytes=head_bytes, group=group)

    def tiles(self, query: Tensor, cache: Tensor, num_seqs: int = 1) -> tuple[DecodeTiles, PrefillTiles]:
        """Return (tile sizes for decode, tile sizes for prefill) that this device uses for a query and cache of these
        shapes.
        """
        head_bytes = padded(query.shape[2]) * query.element_size()
        return (
            decode_tiles(
                self._limits,
                head_bytes=head_bytes,
                block_tokens=cache.shape[3],
                is_coded=is_coded(cache),
                num_heads=num_seqs * cache.shape[2],
            ),
            prefill_tiles(
                self._limits, head_bytes=head_bytes, element_bytes=query.element_size(), is_coded=is_coded(cache)
            ),
        )


def _has_singles(query: Tensor, meta: AttentionMetadata) -> bool:
    """Return whether the step may have sequences with exactly one new token, which the decode kernel computes."""
    # If all sequences have the same number of new tokens, more than one, then no sequence has a single one.
    are_equal = query.shape[0] == meta.context_lens.shape[0] * meta.max_query_len
    return meta.max_query_len == 1 or (meta.has_singles and not are_equal)


def _splits_rows(cache: Tensor) -> bool:
    """Return whether the stride of a block is not a multiple of this layer's head_dim, because other layers have heads
    of another size. The kernels do not support that, since they count in whole rows.
    """
    return cache.stride(0) % cache.shape[4] != 0


def _has_one_plane(cache: Tensor) -> bool:
    """Return whether K and V of this layer are the same memory (latent attention). Kernels for two planes would read
    wrong memory as V.
    """
    return cache.stride(1) == 0

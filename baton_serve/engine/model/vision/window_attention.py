"""Computes the attention of vision towers that read an image in windows (Qwen2.5-VL), all windows of a layer at once.

transformers calls its attention once for each window unless a library for windows of mixed lengths is installed. An
image of 1,024 x 1,024 pixels has 100 windows in each of 28 layers: the calls take longer than the work.
"""

import inspect
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

NAME = "baton_flash_windows"
"""Name of the implementation in transformers' AttentionInterface. With "flash" in a name, layers pass all windows in
one call, with their ends; versions that know other names alone call it for each window."""

_lengths = cast("dict[Tensor, tuple[int, ...]]", WeakTensorKeyDictionary())
"""The windows' lengths by the tensor of their ends, which all layers share: to read it waits for the device."""


def attend_windows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return ([1, positions, heads, head dim], None): attention in both directions within each window.

    `query`, `key` and `value` are [1, heads, positions, head dim]; `cu_seq_lens_q` are the windows' ends, with 0 before
    them, int32. Without it all positions are one window.
    """
    assert attention_mask is None, "positions of a window see all of it"
    lengths = (query.shape[2],) if cu_seq_lens_q is None else _lengths_of(cu_seq_lens_q)
    if len(set(lengths)) == 1:  # such as the frames of a video
        shape = query.shape[1], len(lengths), lengths[0], -1
        q, k, v = (states[0].reshape(shape).transpose(0, 1) for states in (query, key, value))
        found = F.scaled_dot_product_attention(q, k, v, scale=scaling)
        return found.transpose(1, 2).reshape(1, query.shape[2], query.shape[1], -1), None
    result = query.new_empty((query.shape[2], query.shape[1], value.shape[3]))
    for places in _places(lengths, query.device):
        q, k, v = (states[0].transpose(0, 1)[places].transpose(1, 2) for states in (query, key, value))
        result[places] = F.scaled_dot_product_attention(q, k, v, scale=scaling).transpose(1, 2)
    return result[None], None


def use_window_attention(module: nn.Module) -> None:
    """Let the layers of a tower that attend within windows use `attend_windows`."""
    from transformers import AttentionInterface  # takes seconds: only models with a tower should pay them

    for layer in module.modules():
        if "cu_seqlens" in inspect.signature(layer.forward).parameters and hasattr(layer, "config"):
            AttentionInterface.register(NAME, attend_windows)
            cast(Any, layer).config._attn_implementation = NAME


def _lengths_of(ends: Tensor) -> tuple[int, ...]:
    known = _lengths.get(ends)
    if known is None:
        known = _lengths[ends] = tuple(ends.diff().tolist())
    return known


@lru_cache(maxsize=32)
def _places(lengths: Sequence[int], target: torch.device) -> list[Tensor]:
    """Return, for each length of windows, the positions of all windows of this length: int64 [windows, length]."""
    begins = list(accumulate(lengths, initial=0))[:-1]
    found = []
    for length in sorted(set(lengths)):
        begin = torch.tensor([start for start, other in zip(begins, lengths, strict=True) if other == length])
        found.append((begin[:, None] + torch.arange(length)).to(target))
    return found

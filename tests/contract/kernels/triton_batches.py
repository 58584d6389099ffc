"""Random batches for the Triton tests, and the device they run on: an accelerator, or Triton's interpreter.

Whether Triton interprets is decided in tests/conftest.py, before anything imports triton.
"""

import itertools
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from baton_serve.engine.kernels import AttentionMetadata

DEVICE = torch.device("cpu")
if os.environ["TRITON_INTERPRET"] == "0":
    DEVICE = torch.accelerator.current_accelerator() or DEVICE
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Batch:
    query: Tensor
    key: Tensor
    value: Tensor
    cache: Tensor  # a layer's strided view; K and V that nobody wrote are NaN, such as all of block 0
    meta: AttentionMetadata


def random_batch(
    queries: list[int],
    contexts: list[int],
    *,
    heads: int = 3,
    kv_heads: int = 1,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Batch:
    torch.manual_seed(0)
    per_seq = -(-max(contexts) // BLOCK_TOKENS)
    tables = (torch.randperm(per_seq * len(contexts)) + 1).int().view(len(contexts), per_seq)
    places = [
        [int(tables[s, p // BLOCK_TOKENS]) * BLOCK_TOKENS + p % BLOCK_TOKENS for p in range(context)]
        for s, context in enumerate(contexts)
    ]
    slots = [slot for place, new in zip(places, queries, strict=True) for slot in place[len(place) - new :]]
    whole = torch.full((tables.numel() + 1, 3, 2, kv_heads, BLOCK_TOKENS, head_dim), float("nan"))
    for slot in itertools.chain.from_iterable(places):
        whole[slot // BLOCK_TOKENS, 1, :, :, slot % BLOCK_TOKENS] = torch.randn(2, kv_heads, head_dim)
    qkv = torch.randn(sum(queries), heads + 2 * kv_heads, head_dim).to(DEVICE, dtype)
    meta = AttentionMetadata(
        query_starts=torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32, device=DEVICE),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
        block_tables=tables.to(DEVICE),
        slots=torch.tensor(slots, dtype=torch.int64, device=DEVICE),
        max_query_len=max(queries),
        max_context_len=max(contexts),
    )
    return Batch(
        query=qkv[:, :heads],
        key=qkv[:, heads : heads + kv_heads],
        value=qkv[:, heads + kv_heads :],
        cache=whole.to(DEVICE, dtype)[:, 1],
        meta=meta,
    )

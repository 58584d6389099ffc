"""What an attention kernel is told: the batch's shape, the layer's rules, and the port every backend fits.

Knows nothing of requests, schedulers or models. One `AttentionMetadata` is built per step, for all layers.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """A ragged batch: sequence `s` owns the query rows `query_starts[s]:query_starts[s + 1]`.

    Row `i` of a sequence sits at position `context_len - query_len + i`; chunks of prompts and single decode
    tokens mix freely. A sequence without new tokens is legal and yields nothing.
    """

    query_starts: Tensor  # int32 [num_seqs + 1], prefix sums of new tokens
    context_lens: Tensor  # int32 [num_seqs], KV tokens including this step's new ones
    block_tables: Tensor  # int32 [num_seqs, max_blocks], rows padded with 0
    slots: Tensor  # int64 [num_tokens], block * block_tokens + offset where each new token's K/V goes
    max_query_len: int
    max_context_len: int


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The rules of one layer. A token at position p sees p - sliding_window + 1 .. p; `softcap` c turns a
    scaled score x into c * tanh(x / c); `sinks` join each row's softmax and carry no value (gpt-oss)."""

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [num_heads]


class AttentionBackend(Protocol):
    """`cache` is one layer's strided view [num_blocks, 2, num_kv_heads, block_tokens, head_dim] of the
    block-major tensor. Nothing here keeps a tensor after it returns."""

    def store(self, key: Tensor, value: Tensor, cache: Tensor, meta: AttentionMetadata) -> None:
        """Writes key/value [num_tokens, num_kv_heads, head_dim] to `meta.slots`."""
        ...

    def attend(self, query: Tensor, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec) -> Tensor:
        """query [num_tokens, num_heads, head_dim] -> the same shape and dtype; causal over the stored K/V."""
        ...

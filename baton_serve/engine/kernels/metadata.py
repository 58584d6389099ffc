"""What an attention kernel is told: the batch's shape, the layer's rules, and the port every backend fits.

Knows nothing of requests, schedulers or models. One `AttentionMetadata` is built per step, for all layers.
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from baton_serve.engine.kernels.quantized import QuantizedWeight, StackedWeight


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """A ragged batch: sequence `s` owns the query rows `query_starts[s]:query_starts[s + 1]`.

    Row `i` of a sequence sits at position `context_len - query_len + i`; chunks of prompts and single decode
    tokens mix freely. A sequence without new tokens is legal and yields nothing.
    """

    query_starts: Tensor  # int32 [num_seqs + 1], prefix sums of new tokens
    context_lens: Tensor  # int32 [num_seqs], KV tokens including this step's new ones
    block_tables: Tensor  # int32 [num_seqs, max_blocks], rows padded with 0
    slots: Tensor  # int64 [num_tokens], block * block_tokens + offset of each new token; < 0: not stored
    max_query_len: int
    max_context_len: int
    has_singles: bool = True
    """Beside longer ones there may be sequences with exactly one new token."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The rules of one layer. A token at position p sees p - sliding_window + 1 .. p; `softcap` c turns a
    scaled score x into c * tanh(x / c); `sinks` join each row's softmax and carry no value (gpt-oss); `alibi` slopes m
    lower a scaled score by m for each token between query and key (https://arxiv.org/abs/2108.12409)."""

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [num_heads]
    alibi: Tensor | None = None  # float32 [num_heads]


@dataclass(frozen=True, slots=True)
class Experts:
    """The weights of one layer's experts, stacked. An expert is down(silu(gate) * up); with `limit` both are clamped
    and it is down((up + 1) * gate * sigmoid(alpha * gate)), as gpt-oss has it."""

    gate_up: Tensor | StackedWeight  # [num_experts, 2 * width, hidden]
    down: Tensor | StackedWeight  # [num_experts, hidden, width]; in few bits both or none
    gate_up_bias: Tensor | None = None  # [num_experts, 2 * width]
    down_bias: Tensor | None = None  # [num_experts, hidden]
    is_interleaved: bool = False  # gate and up rows are neighbours, not halves
    limit: float | None = None
    alpha: float = 1.0

    @property
    def num_experts(self) -> int:
        return self.down.count if isinstance(self.down, StackedWeight) else self.down.shape[0]


@dataclass(frozen=True, slots=True)
class Norm:
    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class NewHeads:
    """A layer's new queries, keys and values as their product left them: `heads` [num_tokens, num_heads + 2 *
    num_kv_heads, head_dim]. Queries and keys are yet to be normed, where there are norms, and then to be rotated by cos
    and sin [num_tokens, rotary_dim], of which the first half of the columns is read."""

    heads: Tensor
    rotation: tuple[Tensor, Tensor]
    query_norm: Norm | None = None
    key_norm: Norm | None = None


class AttentionBackend(Protocol):
    """`cache` is one layer's strided view [num_blocks, 2, num_kv_heads, block_tokens, head_dim] of the
    block-major tensor. Nothing here keeps a tensor after it returns."""

    def store(self, key: Tensor, value: Tensor, cache: Tensor, meta: AttentionMetadata) -> None:
        """Writes key/value [num_tokens, num_kv_heads, head_dim] to `meta.slots`."""
        ...

    def attend(self, query: Tensor, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec) -> Tensor:
        """query [num_tokens, num_heads, head_dim] -> the same shape and dtype; causal over the stored K/V."""
        ...

    def attend_new(self, new: NewHeads, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec) -> Tensor | None:
        """Norms and rotates heads, writes K and V to `meta.slots` and attends, for sequences with one new token each:
        [num_tokens, num_heads, head_dim]. `new` stays as it is. None, and nothing is done, where no kernel does all of
        it at once faster than one after the other."""
        ...


class PackedWeight(Protocol):
    """A quantized weight in the order that one device's kernels read. Only they look inside."""

    @property
    def outputs(self) -> int: ...

    @property
    def inputs(self) -> int: ...


Weight: TypeAlias = Tensor | QuantizedWeight | PackedWeight
"""The right operand of a product, [outputs, inputs] or what stands for it."""


class PreparedActivations(Protocol):
    """Rows in the form in which one device's kernels multiply them by one kind of weight. Only they look inside."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def inputs(self) -> int: ...


Activations: TypeAlias = Tensor | PreparedActivations
"""The left operand of a product, [num_tokens, inputs] or what stands for it."""


@dataclass(frozen=True, slots=True)
class Linear:
    weight: Weight
    bias: Tensor | None


class LayerKernels(Protocol):
    """A layer's matrix products, and the steps between them in one pass over memory. Modules and objects fit."""

    def pack(self, weight: QuantizedWeight) -> Weight:
        """The same weight as `linear` reads it fastest; the caller gives up the given one."""
        ...

    def linear(self, x: Activations, weight: Weight, bias: Tensor | None) -> Tensor:
        """x [num_tokens, inputs], or made for this weight; weight [outputs, inputs] -> [num_tokens, outputs]."""
        ...

    def embed(self, token_ids: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
        """token_ids [...] -> rows of a quantized `weight` as numbers [..., inputs]."""
        ...

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        *,
        residual: Tensor | None = None,
        unit_offset: bool = False,
    ) -> Tensor:
        """x [..., hidden] -> normed. With `residual` the norm is of x + residual, and that sum is left in
        `residual`. Rounds to x's dtype before it multiplies by `weight`, as Llama does; `unit_offset` multiplies
        by 1 + weight and rounds once, as Gemma does."""
        ...

    def norm_for(self, x: Tensor, norm: Norm, then: Weight, *, residual: Tensor | None = None) -> Activations:
        """`rms_norm` of x [num_tokens, hidden], as `linear` of `then` reads it fastest."""
        ...

    def linear_norm(
        self, x: Activations, product: Linear, residual: Tensor, norm: Norm, then: Weight | None = None
    ) -> Activations:
        """RMSNorm of `linear` + `residual` [num_tokens, outputs], which becomes that sum; with `then` as `norm_for`."""
        ...

    def gated_linear(self, x: Activations, gate_up: Linear, then: Weight) -> Activations:
        """`silu_mul` of `linear`, as `linear` of `then` reads it fastest."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[..., 2 * width] (gate, then up) -> silu(gate) * up [..., width]."""
        ...

    def rotation(self, positions: Tensor, frequencies: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """positions int64 [num_tokens], frequencies float32 [half] in radians a token -> cos and sin times `scaling`,
        float32 [num_tokens, 2 * half], both halves alike."""
        ...

    def rotary_store(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: Tensor,
        slots: Tensor,
        *,
        interleaved: bool = False,
    ) -> None:
        """Rotates `query` [num_tokens, num_heads, head_dim] in place; writes rotated K, and V, to `slots` of the
        layer's cache view. `rotation`: cos and sin [num_tokens, rotary_dim], of which the first half of the columns
        is read; the rest of a head passes through. `interleaved`: pairs are neighbours (GLM, GPT-J), not halves."""
        ...

    def route(self, logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
        """logits [num_tokens, num_experts] -> weights, float32, and expert numbers, int32, both [num_tokens, top_k]:
        the softmax's largest, with `renormalize` scaled to a sum of 1."""
        ...

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
        """x [num_tokens, hidden] -> the weighted sum of the experts that each token chose, same shape."""
        ...


class RowLayer(Protocol):
    """What is read of a decoder layer."""

    @property
    def input_norm(self) -> Norm: ...
    @property
    def qkv(self) -> Linear: ...
    @property
    def query_norm(self) -> Norm | None: ...
    @property
    def output(self) -> Linear: ...
    @property
    def mlp_norm(self) -> Norm: ...
    @property
    def gate_up(self) -> Linear | None: ...
    @property
    def down(self) -> Linear | None: ...


class RowKernel(Protocol):
    """All layers of a decoder for one row."""

    def __call__(
        self, residual: Tensor, rotation: tuple[Tensor, Tensor], caches: list[Tensor], meta: AttentionMetadata
    ) -> bool:
        """Whether `residual` [1, hidden] has gone through all layers, and its K and V to `meta.slots`; if not, nothing
        was touched. `rotation`: cos and sin, float32 [1, head_dim]. `caches`: each layer's view."""
        ...

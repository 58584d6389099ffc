"""Defines the inputs and interfaces of all kernels: attention metadata, rules of a layer, weights, backends.

Nothing here knows of requests, schedulers or models. The engine builds one `AttentionMetadata` for each step, for all
layers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from baton_serve.engine.kernels.quantized_weights import QuantizedWeight, StackedWeight


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The sequences of a step for attention, whose tokens lie one after another without padding: sequence `s` owns the
    query rows `query_starts[s]:query_starts[s + 1]`.

    Row `i` of a sequence has the position `context_len - query_len + i`. Chunks of prompts and single decode tokens can
    be mixed freely. A sequence without new tokens is allowed and yields nothing.
    """

    query_starts: Tensor  # int32 [num_seqs + 1], prefix sums of new tokens
    context_lens: Tensor  # int32 [num_seqs], KV tokens including this step's new ones
    block_tables: Tensor  # int32 [num_seqs, max_blocks], rows padded with 0
    slots: Tensor  # int64 [num_tokens], block * block_tokens + offset of each new token; < 0: not stored
    max_query_len: int
    max_context_len: int
    has_singles: bool = True
    """True if sequences with exactly one new token may be among longer ones."""
    seen_ends: Tensor | None = None
    """int32 [num_tokens]: the position behind the last token that each row sees, for images or prompts whose tokens see
    each other in both directions. It never lies before the row or behind its sequence. None: each row sees itself
    last."""
    unwindowed: Tensor | None = None
    """bool [num_tokens]: rows that see all tokens before `seen_ends` in layers with a sliding window, too. None: no row
    does. Kernels do not support that: `BidirectionalPrompts` lets such a layer attend with and without its window."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention rules of one layer.

    A token at position p sees the positions p - sliding_window + 1 to p. `softcap` c replaces a scaled score x by c *
    tanh(x / c). `sinks` take part in each row's softmax and carry no value (gpt-oss). `alibi` slopes m lower a scaled
    score by m for each token between query and key (https://arxiv.org/abs/2108.12409). With `value_dim`, the value is
    only the first elements of a V row: of a latent (MLA), the part without rotation.

    With `chunk` (Llama 4), a token sees only the earlier tokens of its own chunk of `chunk` positions. Kernels do not
    support that: such a layer gets each chunk of a sequence as a sequence of its own.
    """

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [num_heads]
    alibi: Tensor | None = None  # float32 [num_heads]
    value_dim: int | None = None  # None: head_dim
    chunk: int | None = None

    def to(self, device: torch.device) -> "AttentionSpec":
        """Return the same rules with their tensors on `device`."""
        sinks, alibi = (None if part is None else part.to(device) for part in (self.sinks, self.alibi))
        return replace(self, sinks=sinks, alibi=alibi)


@dataclass(frozen=True, slots=True)
class Experts:
    """The stacked weights of the experts of one mixture-of-experts layer. An expert computes down(silu(gate) * up). If
    `limit` is set, gate and up are clamped to it, and the expert computes down((up + 1) * gate * sigmoid(alpha *
    gate)), as in gpt-oss.
    """

    gate_up: Tensor | StackedWeight  # [num_experts, 2 * width, hidden]
    down: Tensor | StackedWeight  # [num_experts, hidden, width]; in few bits both or none
    gate_up_bias: Tensor | None = None  # [num_experts, 2 * width]
    down_bias: Tensor | None = None  # [num_experts, hidden]
    is_interleaved: bool = False  # gate and up rows are neighbours, not halves
    limit: float | None = None
    alpha: float = 1.0
    is_part: bool = False
    """True if other ranks hold more experts. Tokens may choose larger numbers than these, which add nothing here."""

    @property
    def num_experts(self) -> int:
        return self.down.count if isinstance(self.down, StackedWeight) else self.down.shape[0]

    @property
    def is_plain(self) -> bool:
        """Return whether an expert is silu(gate) * up without biases, and its gates come before its ups."""
        has_bias = self.gate_up_bias is not None or self.down_bias is not None
        return not has_bias and not self.is_interleaved and self.limit is None


@dataclass(frozen=True, slots=True)
class Norm:
    """The weight and epsilon of an RMSNorm, or of a LayerNorm if it `is_centered`. With `has_offset` an RMSNorm
    multiplies by 1 + weight, as Gemma's do.
    """

    weight: Tensor  # [hidden]; of a LayerNorm of heads also [num_heads, head_dim]
    eps: float
    bias: Tensor | None = None
    is_centered: bool = False
    has_offset: bool = False

    @property
    def is_plain(self) -> bool:
        """Return whether this is an RMSNorm that multiplies by its weight, as Llama's: the only kind that fused kernels
        compute.
        """
        return not self.is_centered and not self.has_offset


@dataclass(frozen=True, slots=True)
class NewHeads:
    """A layer's new queries, keys and values as the QKV projection has computed them, side by side: `heads`
    [num_tokens, num_heads + 2 * num_kv_heads, head_dim].

    Queries and keys still need the plain norms of each head, if the model has any, and then the rotation by cos and sin
    [num_tokens, rotary_dim]. Only the first half of the columns of cos and sin is read.
    """

    heads: Tensor
    rotation: tuple[Tensor, Tensor]
    query_norm: Norm | None = None
    key_norm: Norm | None = None


class AttentionBackend(Protocol):
    """The interface of attention kernels. `cache` is one layer's strided view [num_blocks, 2, num_kv_heads,
    block_tokens, head_dim] of the KV cache, in which all layers of a block lie together. An implementation must not
    keep a tensor after it returns.
    """

    def store(self, key: Tensor, value: Tensor, cache: Tensor, meta: AttentionMetadata) -> None:
        """Write key and value [num_tokens, num_kv_heads, head_dim] to the positions `meta.slots` of one layer's cache
        view.
        """
        ...

    def attend(self, query: Tensor, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec) -> Tensor:
        """Return causal attention of `query` [num_tokens, num_heads, head_dim] over the keys and values in the cache,
        which include those of the new tokens: [num_tokens, num_heads, value_dim] of the same dtype.
        """
        ...

    def attend_new(self, new: NewHeads, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec) -> Tensor | None:
        """For sequences with one new token each, in one kernel: apply norms and rotation to the new heads, write K and
        V to `meta.slots`, and return attention [num_tokens, num_heads, head_dim]. `new` is not changed.

        Return None, with nothing done, if no single kernel does all of it faster than separate steps.
        """
        ...


def no_work() -> None:
    """Do nothing. It is the default where a caller may pass a function."""


class PackedWeight(Protocol):
    """A weight matrix in the order in which the kernels of one device read it. Its fields are known to these kernels
    only.
    """

    @property
    def outputs(self) -> int: ...

    @property
    def inputs(self) -> int: ...


Weight: TypeAlias = Tensor | QuantizedWeight | PackedWeight
"""The right operand of a product: [outputs, inputs], or an object that represents it."""


class PreparedActivations(Protocol):
    """The input of a matrix product in the form in which one device's kernels multiply it by one kind of weight, for
    example quantized. Its fields are known to these kernels only.
    """

    @property
    def num_tokens(self) -> int: ...

    @property
    def inputs(self) -> int: ...


Activations: TypeAlias = Tensor | PreparedActivations
"""The left operand of a product: [num_tokens, inputs], or an object that represents it."""


@dataclass(frozen=True, slots=True)
class Linear:
    """The weight and the bias (None: none) of one linear layer, or of several that are joined."""

    weight: Weight
    bias: Tensor | None


GROUP_ROWS = 16
"""Rows of an operand of a matrix unit; fewer rows cost the same."""


@dataclass(frozen=True, slots=True)
class SlotWeights:
    """The LoRA matrices of all adapter slots for one fused product, padded with zeros to one rank. They are multiplied
    in their own dtype, which may differ from the model's.

    A product may consist of up to three parts side by side, such as query, key and value, which have `down` matrices of
    their own.
    """

    down: Tensor  # [num_slots, num_parts * rank, inputs]
    up: Tensor  # [num_slots, outputs, rank], with the scale
    ends: tuple[int, ...]
    """The column behind the last one of each part."""


@dataclass(frozen=True, slots=True)
class SlotRows:
    """The LoRA adapter slot of each token of a step, and groups of tokens with the same slot, all int64. Slot -1 means
    no adapter.

    A group has up to `GROUP_ROWS` tokens. If the step has no more than that, each slot has one group.
    """

    slots: Tensor  # [num_tokens]
    order: Tensor  # [num_tokens], numbers of rows, sorted by slot
    groups: Tensor  # [3, num_groups]: slot, or -1 for no group, first position in `order`, and end


class AdapterKernels(Protocol):
    """Kernels that add the products of several LoRA adapters to a linear layer's output: `shrink` multiplies by the
    first matrix, `expand` by the second. Their work depends on shapes only, so graphs can capture it.
    """

    def low_rank(self, x: Tensor, weights: SlotWeights) -> Tensor:
        """Allocate memory for the result of `shrink` for x [num_tokens, inputs], and return it without filling it."""
        ...

    def shrink(self, low: Tensor, x: Tensor, weights: SlotWeights, rows: SlotRows) -> None:
        """Multiply each token of `x` by the `down` matrices of its adapter slot, and store the result in `low`, in the
        order that `expand` reads.
        """
        ...

    def expand(self, output: Tensor, low: Tensor, weights: SlotWeights, rows: SlotRows) -> None:
        """Multiply `low`, the result of `shrink`, by the `up` matrices of each token's adapter slot, and add the
        product to `output` [num_tokens, outputs].
        """
        ...


class LayerKernels(Protocol):
    """The interface of the operations in a decoder layer besides attention: matrix products, norms, activations,
    rotation and experts. Methods that combine several operations save passes over memory. Modules and objects can
    implement it.
    """

    def pack(self, weight: Tensor | QuantizedWeight) -> Weight:
        """Return a weight in the form that `linear` reads fastest; that may be the given object itself. A quantized
        weight must not be used afterwards, since its memory may be taken over.
        """
        ...

    def linear(self, x: Activations, weight: Weight, bias: Tensor | None) -> Tensor:
        """Multiply x [num_tokens, inputs], or activations that were prepared for this weight, by the weight [outputs,
        inputs]. Return [num_tokens, outputs].
        """
        ...

    def embed(self, token_ids: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
        """Return the rows `token_ids` [...] of a quantized embedding table `weight`, dequantized to `dtype`, [...,
        inputs].
        """
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
        """Return the RMSNorm of x [..., hidden], with the same shape.

        With `residual`, the norm is that of x + residual, and this sum is stored in `residual`. The result is rounded
        to x's dtype before it is multiplied by `weight`, as Llama does. `unit_offset` multiplies by 1 + weight and
        rounds once, as Gemma does.
        """
        ...

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Return the norm of x [..., hidden], with the same shape: an RMSNorm of any kind, or a LayerNorm, which rounds
        once.
        """
        ...

    def norm_for(self, x: Tensor, norm: Norm, then: Weight, *, residual: Tensor | None = None) -> Activations:
        """Return the plain RMSNorm of x [num_tokens, hidden], or of x + `residual`, which becomes that sum. The result
        is in the form that `linear` reads fastest for the weight `then`.
        """
        ...

    def linear_norm(
        self,
        x: Activations,
        product: Linear,
        residual: Tensor,
        norm: Norm,
        then: Weight | None = None,
        *,
        before_norm: Callable[[], None] = no_work,
    ) -> Activations:
        """Add the product of `x` with `product` to `residual` [num_tokens, outputs] in place, and return the plain
        RMSNorm of the sum, in the form that `linear` reads fastest for the weight `then` (None: a plain tensor).

        `before_norm` is called after the product and before `residual` is read; it may change `residual`.
        """
        ...

    def gated_linear(self, x: Activations, gate_up: Linear, then: Weight) -> Activations:
        """Return silu(gate) * up, where the joined weight `gate_up` computes gate and up from x. The result is in the
        form that `linear` reads fastest for the weight `then`.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, [..., width], for `gate_up` [..., 2 * width], in which the gate comes first."""
        ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """Return gelu(gate) * up, [..., width], for `gate_up` [..., 2 * width], in which the gate comes first. GELU is
        approximated by tanh.
        """
        ...

    def rotation(self, positions: Tensor, frequencies: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) of the angles position * frequency, times `scaling`, both float32 [num_tokens, 2 * half]
        with two equal halves. `positions` is int64 [num_tokens]; `frequencies` is float32 [half] in radians per token.
        """
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
        """Rotate `query` [num_tokens, num_heads, head_dim] in place, and write the rotated K, and V, to `slots` of the
        layer's cache view.

        `rotation` holds cos and sin [num_tokens, rotary_dim], of which the first half of the columns is read; the rest
        of a head is not rotated. With `interleaved`, the pairs that rotate are neighbours (GLM, GPT-J) instead of
        halves.
        """
        ...

    def route(
        self, logits: Tensor, top_k: int, *, renormalize: bool, num_shared: int = 0, has_gate: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Choose `top_k` experts for each token: those with the largest softmax of logits [num_tokens, num_experts].

        Return (weights float32, numbers int32) of the experts, both [num_tokens, top_k + num_shared]. `renormalize`
        scales the weights of the chosen to a sum of 1. All tokens also get the `num_shared` experts behind the others,
        with the weight 1; with `has_gate` it is the sigmoid of one more column of `logits`.
        """
        ...

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, with the shape of x [num_tokens, hidden].
        `weights` and `chosen` are results of `route`.
        """
        ...


class RowLayer(Protocol):
    """The weights of one decoder layer, as `RowKernel` reads them. A weight that the layer does not have is None."""

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
    """Computes all layers of a decoder in a single kernel, for a step of one token of one sequence."""

    def __call__(
        self, residual: Tensor, rotation: tuple[Tensor, Tensor], caches: list[Tensor], meta: AttentionMetadata
    ) -> bool:
        """Compute all layers in place in `residual` [1, hidden], the token's embedding, and write its K and V to
        `meta.slots`. Return False, with nothing done, if the kernel does not support this step.

        `rotation` is (cos, sin), float32 [1, head_dim]; `caches` are the layers' views of the KV cache.
        """
        ...

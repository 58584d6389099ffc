"""Describes a loaded model to the rest of the engine: layers, KV shapes, recurrent states, fingerprint. This module
does not import transformers, which takes seconds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, cast

import msgspec
import torch
from torch import nn

from baton_serve.contracts.block_layout import KVShape
from baton_serve.engine.collectives.stage_layers import Stage
from baton_serve.engine.kernels import AttentionSpec
from baton_serve.engine.kv.state_memory import StatePart, row_bytes, unused_kv_shapes
from baton_serve.engine.model.attention_parts import HeadRange
from baton_serve.engine.model.rank_parts import WHOLE, RankParts
from baton_serve.engine.model.weight_offload import WeightOffload

LoadProgress = Callable[[str, float], None]
"""Called with the current phase of loading and its finished fraction, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class SharedLayer:
    """An attention layer that has no KV of its own, but reads that of another layer."""

    layer: int
    source: int
    """The layer whose KV it reads. Both are the model's own numbers."""
    spec: AttentionSpec


class StageCache(msgspec.Struct, frozen=True, array_like=True):
    """Describes what the layers of one pipeline stage keep of a sequence, on all of its tensor-parallel ranks."""

    kv_shapes: tuple[KVShape, ...] = ()
    """The shape of the KV of each layer that has KV."""
    state_bytes: int = 0
    """Size of the recurrent states in bytes."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model whose weights are loaded on the device, and what the scheduler and the KV cache need to know about it."""

    module: nn.Module
    name: str
    dtype: torch.dtype
    vocab_size: int
    max_model_len: int
    kv_shapes: tuple[KVShape, ...]
    """The shape of the KV of each layer that has KV, with the heads of this rank."""
    specs: list[AttentionSpec]
    """Attention parameters of each layer that has KV."""
    eos_token_ids: frozenset[int]
    """Tokens that end a sequence."""
    fingerprint: str
    """Hash of everything that changes the KV: config, weights, rounding.

    Equal fingerprints mean exchangeable blocks.
    """
    parts: RankParts = WHOLE
    """The parts of the weights that this rank holds."""
    kv_layers: tuple[int, ...] | None = None
    """The model's number of each layer that has KV, in the order of the cache and of `specs`; None: all layers."""
    shared_layers: tuple[SharedLayer, ...] = ()
    """The layers that read the KV of other layers."""
    states: tuple[StatePart, ...] = ()
    """The recurrent states of layers of linear attention and state spaces."""
    source_tokens: int = 0
    """Positions of an encoder's output, whose KV each layer keeps for cross-attention in the shape of its own KV; 0 for
    models without cross-attention."""
    has_position_rows: bool = False
    """True if the positions of image tokens have three parts (M-RoPE)."""
    has_bidirectional_prompts: bool = False
    """True if all tokens of a prompt attend to each other in both directions."""
    offload: WeightOffload | None = None
    """The decoder layers whose weights are in host memory; None: all weights are on the device."""
    stages: tuple[StageCache, ...] = ()
    """The cache of each pipeline stage. It is known when all stages are loaded, and empty for the only stage."""

    @property
    def stage(self) -> Stage:
        """Return the pipeline stage whose layers are loaded. With several stages, most fields describe these layers
        alone.
        """
        return self.parts.stage

    @property
    def hidden_size(self) -> int:
        """Return the size of the hidden states between decoder layers."""
        stated: Any = cast(Any, self.module).config
        get_text_config = getattr(stated, "get_text_config", None)
        # Configs of this project's own loader have no parts.
        return int((stated if get_text_config is None else get_text_config()).hidden_size)

    @property
    def cached(self) -> StageCache:
        """Return what the loaded layers keep of a sequence, with the heads and states of all tensor-parallel ranks."""
        pairs = zip(self.kv_heads, self.kv_shapes, strict=True)
        shapes = tuple(KVShape(heads.total, shape.head_dim, shape.num_planes) for heads, shape in pairs)
        return StageCache(shapes, row_bytes(self.states))

    def joined(self, stages: tuple[StageCache, ...]) -> "LoadedModel":
        """Return this model with what the layers of all pipeline stages keep, in the order of the stages; () without a
        pipeline.

        If no layer of any stage has attention, the first stage gets KV that no layer reads.
        """
        if not stages or any(stage.kv_shapes for stage in stages):
            return replace(self, stages=stages)
        shapes = unused_kv_shapes(sum(stage.state_bytes for stage in stages))
        every = (StageCache(shapes, stages[0].state_bytes), *stages[1:])
        if not self.stage.is_first:
            return replace(self, stages=every)
        specs = [AttentionSpec(shape.head_dim**-0.5) for shape in shapes]
        return replace(self, stages=every, kv_shapes=shapes, specs=specs, kv_layers=tuple(range(len(shapes))))

    @property
    def block_shapes(self) -> tuple[KVShape, ...]:
        """Return the KV shape of each layer in a KV block, over all pipeline stages and with the heads of all ranks."""
        return tuple(shape for stage in self.stages for shape in stage.kv_shapes) or self.cached.kv_shapes

    @property
    def state_bytes(self) -> int:
        """Return the size of the recurrent states of one sequence in bytes, over all ranks."""
        return sum(stage.state_bytes for stage in self.stages or (self.cached,))

    @property
    def first_state(self) -> int:
        """Return the byte of a checkpoint at which the recurrent states of this pipeline stage begin."""
        return sum(stage.state_bytes for stage in self.stages[: self.stage.number])

    @property
    def block_layers(self) -> slice | None:
        """Return the range of a KV block's layers that this pipeline stage holds; None: all layers."""
        return self.stage_layers[self.stage.number]

    @property
    def stage_layers(self) -> list[slice | None]:
        """Return the range of a KV block's layers that each pipeline stage holds; [None] without a pipeline."""
        if not self.stages:
            return [None]
        ends = list(accumulate((len(stage.kv_shapes) for stage in self.stages), initial=0))
        return [slice(start, end) for start, end in pairwise(ends)]

    @property
    def attending_layers(self) -> Sequence[int]:
        """Return the layer numbers of the layers that have KV of their own, as the model counts its layers."""
        first = 0 if self.stage.is_whole else self.stage.layers.start
        return range(first, first + len(self.kv_shapes)) if self.kv_layers is None else self.kv_layers

    @property
    def is_whole(self) -> bool:
        """Return False if tensor parallelism divides the layers, so that their outputs have to be summed over the
        ranks.
        """
        return self.parts.is_whole

    @property
    def kv_heads(self) -> list[HeadRange]:
        """Return, for each layer that has KV, which KV heads this rank holds, and how many all ranks have."""
        layers = self.attending_layers
        own = [HeadRange(shape.num_kv_heads, slice(0, shape.num_kv_heads)) for shape in self.kv_shapes]
        return [self.parts.kv_heads.get(layer, heads) for layer, heads in zip(layers, own, strict=True)]

    @property
    def is_uniform(self) -> bool:
        """Return whether the KV of all layers has the same shape."""
        return len(set(self.kv_shapes)) == 1

    @property
    def num_kv_heads(self) -> int:
        """Return the number of KV heads that this rank holds in each layer. Call it only if `is_uniform`."""
        return self._kv_shape.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Return the size of a KV head, which is equal in all layers. Call it only if `is_uniform`."""
        return self._kv_shape.head_dim

    @property
    def _kv_shape(self) -> KVShape:
        assert self.is_uniform, "the layers have different shapes"
        return self.kv_shapes[0]

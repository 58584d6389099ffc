"""Computes decoders with cross-attention (Whisper), and decides which families have one and what their layers keep.

Each layer attends to the tokens before, and then to the output of an encoder. Both kinds of KV have the same shape and
lie in the same KV cache, in blocks of their own. The modules are transformers'; the order of their calls is here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from baton_serve.contracts.block_layout import KVShape
from baton_serve.engine.collectives.backends import Collectives
from baton_serve.engine.kernels import AttentionBackend, AttentionMetadata, AttentionSpec
from baton_serve.engine.model.batch_inputs import SourceRows, StepInputs
from baton_serve.engine.model.loaded_model import LoadedModel
from baton_serve.engine.model.pipeline_stage import own_layers
from baton_serve.engine.model.rank_parts import sum_outputs
from baton_serve.engine.model_folder import HfConfig


@dataclass(frozen=True, slots=True)
class CrossLayer:
    """The modules of one decoder layer with cross-attention, under names that do not depend on the model family.
    Attention modules have `q_proj`, `k_proj`, `v_proj`, `out_proj` and `scaling`.
    """

    own: Any
    own_norm: nn.Module
    cross: Any
    cross_norm: nn.Module
    mlp: Callable[[Tensor], Tensor]
    mlp_norm: nn.Module


@dataclass(frozen=True, slots=True)
class CrossParts:
    """The modules of a decoder with cross-attention, under names that do not depend on the model family."""

    embed: Callable[[Tensor, Tensor], Tensor]
    """Embeds token ids at positions, both int64 [num_tokens]."""
    layers: list[CrossLayer]
    """The decoder layers of this pipeline stage."""
    norm: nn.Module
    head: nn.Module
    num_heads: int


@dataclass(frozen=True, slots=True)
class CrossPort:
    """How the engine uses one family of decoders with cross-attention, such as Whisper: where its modules and sizes
    are.
    """

    source_tokens: Callable[[HfConfig], int]
    """The number of positions of the encoder's output, from the model's config."""
    parts: Callable[[nn.Module], CrossParts]


def cross_port(hf_config: HfConfig) -> CrossPort | None:
    """Return how the engine uses the family of a model with cross-attention; None for a family that it does not
    know.
    """
    return _PORTS.get(hf_config.model_type)


def cross_layers(port: CrossPort, module: nn.Module) -> tuple[tuple[KVShape, ...], list[AttentionSpec]]:
    """Return (the KV shape of each decoder layer, the attention rules of each). Both hold for self-attention and
    cross-attention.
    """
    parts = port.parts(module)
    width = cast(Tensor, parts.layers[0].own.k_proj.weight).shape[0]
    shape = KVShape(parts.num_heads, width // parts.num_heads)
    # Queries are scaled before attention, as in transformers: the order of roundings is part of the result.
    return (shape,) * len(parts.layers), [AttentionSpec(1.0)] * len(parts.layers)


class CrossAttentionForward:
    """Implements `Forward`, and `StagePart` for a stage of a pipeline, for a decoder with cross-attention, such as
    Whisper's.
    """

    is_capturable = True
    parts = None
    adapter_slots = None

    def __init__(self, model: LoadedModel, backend: AttentionBackend, collectives: Collectives) -> None:
        sum_outputs(model.module, model.parts, collectives)
        port = cross_port(cast(Any, model.module).config)
        assert port is not None, "only models with a port have cross-attention"
        self._parts = port.parts(model.module)
        self._specs = model.specs
        self._backend = backend
        self._is_last = model.stage.is_last

    def __call__(self, inputs: StepInputs, layers: list[Tensor]) -> Tensor:
        return self.finish(self.run_stage(inputs, layers, None))

    def run_stage(self, inputs: StepInputs, layers: list[Tensor], received: Tensor | None) -> Tensor:
        """Compute this pipeline stage's layers, and first their cross-attention keys and values of new sources; see
        `StagePart.run_stage`.
        """
        assert inputs.cross is not None, "steps of models with cross-attention have the blocks of sources"
        # Before any layer attends to them; a source may have been encoded for several sequences of the step.
        for source in inputs.sources:
            self._store_source(source, inputs.cross, layers)
        hidden = self._parts.embed(inputs.input_ids, inputs.position_ids) if received is None else received
        for number, (layer, cache, spec) in enumerate(zip(self._parts.layers, layers, self._specs, strict=True)):
            normed = layer.own_norm(hidden)
            self._store(layer.own, normed, cache, inputs.meta)
            # The layer's blocks may be sent now: cross-attention writes nothing.
            if inputs.after_layer is not None:
                inputs.after_layer(number)
            hidden = hidden + self._attend(layer.own, normed, cache, inputs.meta, spec)
            hidden = hidden + self._attend(layer.cross, layer.cross_norm(hidden), cache, inputs.cross, spec)
            hidden = hidden + layer.mlp(layer.mlp_norm(hidden))
        if not self._is_last:
            return hidden
        # The head is the largest product, and most rows of a prompt need no logits.
        if inputs.logit_rows is not None:
            hidden = hidden[inputs.logit_rows]
        return cast(Tensor, self._parts.norm(hidden))

    def finish(self, hidden: Tensor) -> Tensor:
        """Return the logits for `hidden`, the output of the last norm; see `StagePart.finish`."""
        return cast(Tensor, self._parts.head(hidden))

    def _store_source(self, source: SourceRows, cross: AttentionMetadata, layers: list[Tensor]) -> None:
        """Compute the cross-attention keys and values of an encoder's output in all layers, and store them in the KV
        cache.
        """
        # Cross-attention of tokens stores nothing, so the slots of its metadata are all -1.
        meta = replace(cross, slots=source.slots)
        for layer, cache in zip(self._parts.layers, layers, strict=True):
            self._store(layer.cross, source.states, cache, meta)

    def _store(self, attention: Any, states: Tensor, cache: Tensor, meta: AttentionMetadata) -> None:
        """Compute keys and values of `states` [count, hidden] with the projections of an attention module, and store
        them in the KV cache at `meta.slots`.
        """
        shape = len(states), self._parts.num_heads, -1
        key, value = attention.k_proj(states).view(shape), attention.v_proj(states).view(shape)
        self._backend.store(key, value, cache, meta)

    def _attend(
        self, attention: Any, states: Tensor, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        """Return the output of an attention module for `states` [num_tokens, hidden], which attend to keys and values
        in the KV cache.
        """
        query = (attention.q_proj(states) * attention.scaling).view(len(states), self._parts.num_heads, -1)
        return cast(Tensor, attention.out_proj(self._backend.attend(query, cache, meta, spec).flatten(1)))


def _whisper(module: nn.Module) -> CrossParts:
    """Return the modules of transformers' `WhisperForCausalLM` under the names of `CrossParts`."""
    whole = cast(Any, module)
    decoder = whole.model.decoder
    layers = own_layers(decoder.layers)

    def embed(token_ids: Tensor, positions: Tensor) -> Tensor:
        return cast(Tensor, decoder.embed_tokens(token_ids) + F.embedding(positions, decoder.embed_positions.weight))

    def layer(part: Any) -> CrossLayer:
        return CrossLayer(
            own=part.self_attn,
            own_norm=part.self_attn_layer_norm,
            cross=part.encoder_attn,
            cross_norm=part.encoder_attn_layer_norm,
            mlp=lambda hidden: part.fc2(part.activation_fn(part.fc1(hidden))),
            mlp_norm=part.final_layer_norm,
        )

    return CrossParts(
        embed,
        [layer(part) for part in layers],
        decoder.layer_norm,
        whole.proj_out,
        layers[0].self_attn.num_heads,
    )


_PORTS: Mapping[str, CrossPort] = MappingProxyType(
    {"whisper": CrossPort(lambda config: int(config.max_source_positions), _whisper)}
)
"""The ports, by model type."""

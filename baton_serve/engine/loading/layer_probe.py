"""Records what each layer of a loaded decoder passes to attention and keeps (KV shape, window, recurrent states), by
running a few tokens.

A layer keeps keys and values (attention), recurrent states (linear attention, state spaces, short convolutions), both,
or neither (a layer that is an MLP or a mixture of experts only).
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from baton_serve.contracts.block_layout import KVShape
from baton_serve.engine.collectives.stage_layers import WHOLE_PIPELINE, Stage
from baton_serve.engine.errors import ConfigError, UnsupportedModelError
from baton_serve.engine.kernels import AttentionSpec
from baton_serve.engine.kv.state_memory import UNUSED_KV, StatePart, row_bytes, unused_kv_shapes
from baton_serve.engine.loading.unsupported_models import INSTEAD, refuse_type
from baton_serve.engine.model.loaded_model import SharedLayer
from baton_serve.engine.model.paged_attention import AttentionProbe, LayerShape, StepHolder
from baton_serve.engine.model.pipeline_stage import StagedModule
from baton_serve.engine.model.recurrent import StateProbe
from baton_serve.engine.model_folder import HfConfig, first_line

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "indexed_attention"})
"""Types of layers with KV."""

STATE_LAYERS = frozenset({"linear_attention", "conv"})
"""Types of layers with recurrent states."""

MIXED_LAYERS = frozenset({"hybrid"})
"""Types of layers with both."""

PLAIN_LAYERS = frozenset({"mlp", "moe"})
"""Types of layers that keep nothing."""

SUPPORTED_LAYERS = ATTENTION_LAYERS | STATE_LAYERS | MIXED_LAYERS | PLAIN_LAYERS

NUM_TOKENS = 8
"""Tokens of the probe: enough to check that mixers continue from their states in chunks."""


@dataclass(frozen=True, slots=True)
class ProbedLayers:
    """Describes what the layers of a model keep of each sequence: the shapes of their KV and of their recurrent states.
    `LoadedModel` has the same fields."""

    kv_shapes: tuple[KVShape, ...]
    specs: list[AttentionSpec]
    kv_layers: tuple[int, ...] | None
    shared_layers: tuple[SharedLayer, ...]
    states: tuple[StatePart, ...]
    source_tokens: int = 0


def refuse_unsupported(name: str, text_config: HfConfig) -> None:
    """Raise `UnsupportedModelError` if the config shows that this decoder cannot be served. `name` is the model's in
    the message."""
    refuse_type(text_config)
    others = set(_layer_types(text_config) or []) - SUPPORTED_LAYERS
    if not isinstance(getattr(text_config, "index_topk", None), int):
        # An indexer of another kind, which chooses blocks of tokens.
        others |= set(_layer_types(text_config) or []) & {"indexed_attention"}
    if others:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(sorted(others))}; supported are"
            f" {', '.join(sorted(SUPPORTED_LAYERS))} only: {INSTEAD}"
        )
    # In text alone, models whose images attend in both directions ("vision") are causal.
    if getattr(text_config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        raise UnsupportedModelError(f"{name} attends in both directions; only causal decoders can be served: {INSTEAD}")


def check_index(name: str, text_config: HfConfig, max_model_len: int) -> None:
    """Check a model with sparse attention, whose indexer chooses some tokens to attend to. Raises `ConfigError` if
    `max_model_len` exceeds the number of chosen tokens: up to it all tokens are chosen, and dense attention computes
    the same."""
    chosen = getattr(text_config, "index_topk", None)
    if "indexed_attention" in (_layer_types(text_config) or []) and isinstance(chosen, int) and max_model_len > chosen:
        raise ConfigError(
            f"{name} attends to the {chosen} tokens that an indexer chooses (sparse attention), which is supported only"
            f" for contexts of up to {chosen} tokens, where it chooses all: set max_model_len to {chosen} or less"
            f" instead of {max_model_len}"
        )


def probe_layers(
    module: nn.Module,
    name: str,
    text_config: HfConfig,
    target: torch.device,
    stage: Stage = WHOLE_PIPELINE,
    dtype: torch.dtype = torch.float32,
) -> ProbedLayers:
    """Run a few tokens through the model, or through one stage of it, to find out which KV and recurrent states each
    layer keeps. `dtype` is that of the activations that stages pass on. Raises `UnsupportedModelError` if the model
    cannot run on this engine."""
    # transformers proposes packages for NVIDIA cards whenever it runs such a layer in plain torch.
    logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
    states = StateProbe()
    attention = AttentionProbe(states)
    width = int(text_config.hidden_size)
    received = None if stage.is_first else torch.zeros((NUM_TOKENS, width), dtype=dtype, device=target)
    _run_tokens(module, name, attention, stage, received, target)
    parts = states.parts
    num_layers = int(text_config.num_hidden_layers)
    every = _layer_types(text_config) or ["full_attention"] * num_layers
    types = {i: kind for i, kind in enumerate(every) if stage.is_whole or i in stage.layers}
    _check_states(name, types, parts)
    attending = tuple(i for i, kind in types.items() if kind in ATTENTION_LAYERS | MIXED_LAYERS)
    if not attending:
        # Other stages may have attention, so that only all of them together know the shape of a block.
        return _without_attention(parts) if stage.is_whole else ProbedLayers((), [], (), (), parts)
    shapes = _layer_shapes(attention, name, attending)
    _check_window(name, text_config, types, list(shapes.values()))
    own = {layer: shape for layer, shape in shapes.items() if shape.source is None}
    return ProbedLayers(
        kv_shapes=tuple(shape.kv for shape in own.values()),
        specs=[shape.spec for shape in own.values()],
        kv_layers=None if len(own) == len(types) else tuple(own),
        shared_layers=tuple(
            SharedLayer(layer, shape.source, shape.spec) for layer, shape in shapes.items() if shape.source is not None
        ),
        states=parts,
    )


@torch.inference_mode()
def _run_tokens(
    module: nn.Module,
    name: str,
    attention: AttentionProbe,
    stage: Stage,
    received: torch.Tensor | None,
    target: torch.device,
) -> None:
    """Run the first tokens of the vocabulary through the model, while `attention` records its layers. `received` are
    the activations of the stage before, None for the first. Raises `UnsupportedModelError` if this fails."""
    tokens = torch.arange(NUM_TOKENS, device=target)[None]
    try:
        if not stage.is_whole:
            StagedModule(module, stage).run(attention, tokens, received, {"input_ids": tokens})
            return
        StepHolder(module).run(
            module,
            attention,
            input_ids=tokens,
            position_ids=tokens,
            logits_to_keep=torch.tensor([1], device=target),
        )
    except UnsupportedModelError as exc:
        raise UnsupportedModelError(f"{name} cannot be served: {exc}; {INSTEAD}") from exc
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as exc:
        if isinstance(exc, AttributeError) and isinstance(exc.obj, StateProbe):
            # Up to transformers 5.17, recurrent layers change their cache in ways that cannot be replaced.
            raise UnsupportedModelError(
                f"{name} cannot be served with this version of transformers: its recurrent layers use their cache as"
                f" older versions do ({exc.name}); use transformers 5.23 or later"
            ) from exc
        raise UnsupportedModelError(f"{name} cannot run on paged attention: {first_line(exc)}; {INSTEAD}") from exc


def _layer_types(text_config: HfConfig) -> list[str] | None:
    """Return the type of each layer, such as "sliding_attention", as the config states it; None if the config states no
    types, since all layers then have attention."""
    types = getattr(text_config, "layer_types", None)
    return None if types is None else list(types)


def _check_states(name: str, types: Mapping[int, str], parts: tuple[StatePart, ...]) -> None:
    """Raise `UnsupportedModelError` if the config states layers with recurrent states (`types`) for which the test run
    has found no state in `parts`.

    Such a model keeps the states elsewhere than in transformers' cache.
    """
    found = {part.layer for part in parts}
    hidden = [i for i, kind in types.items() if kind in STATE_LAYERS | MIXED_LAYERS and i not in found]
    if hidden:
        raise UnsupportedModelError(
            f"{name} cannot be served: layer {hidden[0]} is {types[hidden[0]]}, but keeps its states outside of"
            f" transformers' cache: {INSTEAD}"
        )


def _check_window(name: str, text_config: HfConfig, types: Mapping[int, str], shapes: list[LayerShape]) -> None:
    """Raise `UnsupportedModelError` if the config states a sliding window, but no layer passed one to attention in the
    test run. `types` are the types of the layers, and `shapes` what the test run has recorded of them.

    Such a model puts the window into a mask of its own, which paged attention does not see: its answers would differ
    silently.
    """
    window = getattr(text_config, "sliding_window", None)
    is_used = isinstance(window, int) and window > 0 and getattr(text_config, "use_sliding_window", True) is not False
    has_layers = getattr(text_config, "layer_types", None) is None or "sliding_attention" in types.values()
    if is_used and has_layers and all(shape.spec.sliding_window is None for shape in shapes):
        raise UnsupportedModelError(
            f"{name} cannot be served: its config states a sliding window of {window} tokens, which its layers do not"
            f" pass to attention: {INSTEAD}"
        )


def _without_attention(states: tuple[StatePart, ...]) -> ProbedLayers:
    """Return the description of a model whose layers keep recurrent states only, with the states `states`. Its blocks
    have KV that no layer reads."""
    shapes = unused_kv_shapes(row_bytes(states))
    return ProbedLayers(
        kv_shapes=shapes,
        specs=[AttentionSpec(UNUSED_KV.head_dim**-0.5)] * len(shapes),
        kv_layers=tuple(range(len(shapes))),
        shared_layers=(),
        states=states,
    )


def _layer_shapes(probe: AttentionProbe, name: str, attending: tuple[int, ...]) -> dict[int, LayerShape]:
    """Return the KV shape and the attention parameters of each layer with attention, by its number, as the test run has
    recorded them. `attending` are the numbers of these layers.

    Raises `UnsupportedModelError` if a layer has computed attention by itself.
    """
    # The KV cache has one entry for each of these layers, in order.
    if sorted(probe.shapes) != list(attending) or any(len(s) != 1 for s in probe.shapes.values()):
        raise UnsupportedModelError(
            f"{name} cannot be served: {len(probe.shapes)} of its {len(attending)} layers with attention use"
            f" transformers' attention interface; attention of their own is not supported: {INSTEAD}"
        )
    return {layer: probe.shapes[layer][0] for layer in attending}

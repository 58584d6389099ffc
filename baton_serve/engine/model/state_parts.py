"""Decides which heads of linear attention, and so which recurrent states, a tensor-parallel rank holds.

Linear attention by the gated delta rule is divided by its key heads: a rank has these heads, the value heads that read
them, their channels of the convolution, and their part of the states. Other layers with states stay whole: each rank
computes them, and keeps all of their states.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import nn

from baton_serve.engine.collectives.shard import Shard
from baton_serve.engine.kv.state_memory import StatePart
from baton_serve.engine.model.attention_parts import HeadRange, is_linear

Module: TypeAlias = Any  # transformers' modules are untyped bags of attributes

_VALUE_LINEARS = ("in_proj_z", "in_proj_b", "in_proj_a")
"""Products of Qwen3.5 whose outputs are those of one value head after another."""


@dataclass(frozen=True, slots=True)
class DeltaParts:
    """Which part of a layer of linear attention by the gated delta rule one rank holds."""

    layer: int
    key_heads: HeadRange
    value_heads: HeadRange
    channels: tuple[slice, ...]
    """The ranges of the convolution's channels: those of queries, keys and values."""
    rows: Mapping[str, tuple[slice, ...]]
    """Ranges of the outputs of linear layers."""

    def ranges(self, part: StatePart) -> tuple[slice, ...]:
        """Return which indexes of a state's first dimension, over all ranks, this rank holds."""
        return self.channels if part.kind == "conv" else (self.value_heads.part,)


def delta_parts(module: Module, shard: Shard) -> DeltaParts | None:
    """Return which part of a layer of linear attention the rank `shard` holds; None if `module` is of another kind. If
    a number of heads is not divisible by the ranks, the ranges are wrong and the caller must not use them.
    """
    names = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "key_dim", "value_dim", "layer_idx")
    if not all(isinstance(getattr(module, name, None), int) for name in names):
        return None
    if not isinstance(getattr(module, "conv1d", None), nn.Conv1d) or not is_linear(getattr(module, "out_proj", None)):
        return None
    keys, values = (HeadRange(count, shard.part(count)) for count in (module.num_k_heads, module.num_v_heads))
    own_keys, own_values = keys.scaled(module.key_dim), values.scaled(module.value_dim)
    channels = tuple(
        slice(part.start + start, part.stop + start)
        for part, start in ((own_keys, 0), (own_keys, module.key_dim), (own_values, 2 * module.key_dim))
    )
    rows: dict[str, tuple[slice, ...]]
    if is_linear(getattr(module, "in_proj_qkvz", None)):
        # Qwen3-Next has everything of one key head side by side.
        rows = {leaf: (keys.scaled(getattr(module, leaf).out_features),) for leaf in ("in_proj_qkvz", "in_proj_ba")}
    elif all(is_linear(getattr(module, leaf, None)) for leaf in ("in_proj_qkv", *_VALUE_LINEARS)):
        rows = {leaf: (values.scaled(getattr(module, leaf).out_features),) for leaf in _VALUE_LINEARS}
        rows["in_proj_qkv"] = channels
    else:
        return None
    return DeltaParts(module.layer_idx, keys, values, channels, rows)


def narrow_delta(module: Module, parts: DeltaParts) -> None:
    """Set the numbers of heads and channels in the attributes of a layer of linear attention to those of this rank,
    after its weights were cut.
    """
    module.num_k_heads, module.num_v_heads = parts.key_heads.count, parts.value_heads.count
    module.key_dim = module.head_k_dim * module.num_k_heads
    module.value_dim = module.head_v_dim * module.num_v_heads
    module.conv_dim = 2 * module.key_dim + module.value_dim
    conv = module.conv1d
    conv.in_channels = conv.out_channels = conv.groups = module.conv_dim


def placed_states(states: Sequence[StatePart], parts: Mapping[str, DeltaParts]) -> tuple[StatePart, ...]:
    """Return the states of a rank's layers with their places in the states of all ranks. `parts` are this rank's parts
    of the layers that are divided, by module.
    """
    of_layer = {part.layer: part for part in parts.values()}
    return tuple(_placed(state, of_layer.get(state.layer)) for state in states)


def _placed(state: StatePart, own: DeltaParts | None) -> StatePart:
    if own is None:
        return state
    # Channels are divided as the heads are.
    total = own.value_heads.total * state.shape[0] // own.value_heads.count
    return replace(state, ranges=own.ranges(state), total=total)

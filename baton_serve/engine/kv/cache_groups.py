"""Divides layers into cache groups, so that layers with full attention and with a sliding window have KV blocks of
their own.

Layers with full attention are group 0, and a block holds the KV of all of them. Layers with a sliding window are
divided into further groups of at most as many layers, so that all blocks have the same size and come from one pool.
Blocks of these groups are freed once no token sees them any more (`engine.core.window_blocks`).
"""

from collections.abc import Sequence

from torch import Tensor

MAX_BYTES_RATIO = 0.9
"""Largest KV of a sequence of full length with groups, as a fraction of its KV without them."""


def divide_layers(windows: Sequence[int | None], max_model_len: int) -> tuple[int, ...]:
    """Return the cache group of each layer with KV; empty if one block should hold the KV of all layers.

    `windows` has the sliding window of each layer in tokens; None is full attention. Groups are made if sequences of
    `max_model_len` tokens need clearly less KV with them.
    """
    num_full, longest = windows.count(None), max((one for one in windows if one is not None), default=0)
    if not num_full or not longest:
        return ()
    num_groups = -(-(len(windows) - num_full) // num_full)
    # A block has room for as many layers as have full attention, though the last group may have fewer.
    with_groups = num_full * (max_model_len + num_groups * min(max_model_len, longest))
    if with_groups > MAX_BYTES_RATIO * len(windows) * max_model_len:
        return ()
    groups: list[int] = []
    num_seen = 0
    for window in windows:
        groups.append(0 if window is None else 1 + num_seen // num_full)
        num_seen += window is not None
    return tuple(groups)


def layers_of_groups(layers: list[Tensor], layer_groups: Sequence[int]) -> list[Tensor]:
    """Return the view of the KV cache of each layer with KV. `layers` are the parts of a block, and `layer_groups` the
    group of each layer; empty if there is one group.
    """
    if not layer_groups:
        return layers
    num_before = [layer_groups[:number].count(group) for number, group in enumerate(layer_groups)]
    return [layers[place] for place in num_before]

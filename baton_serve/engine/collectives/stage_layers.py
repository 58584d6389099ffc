"""Decides which layers each pipeline-parallel stage holds.

A pipeline divides the layers of a model into consecutive stages. Rank `r` of `size * count` ranks is rank `r % size` of
its stage's tensor-parallel group, and its stage is `r // size`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from baton_serve.engine.errors import ConfigError

MEMORY_TOLERANCE = 0.1
"""Devices whose memory differs by less than this share count as equal, so that equal cards get equal stages."""
STEPS_BEYOND_STAGES = 2
"""How many steps more than stages a pipeline computes at most: one while the first stage waits for the oldest step, and
one so that a stage with a short step need not wait for one with a long step."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a pipeline: its number, from 0, and how many layers each of the stages has. If `num_layers` is
    empty, the model is not divided: the only stage has all layers.
    """

    number: int = 0
    num_layers: tuple[int, ...] = ()

    @property
    def is_whole(self) -> bool:
        return len(self.num_layers) < 2

    @property
    def is_first(self) -> bool:
        """Return whether this is the first stage, which also has the embedding and the output head."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Return whether this stage has the last layer, and applies the last norm."""
        return self.is_whole or self.number == len(self.num_layers) - 1

    @property
    def layers(self) -> range:
        """Return the model's numbers of this stage's layers, as a range. Do not call it without a pipeline
        (`num_layers` empty).
        """
        first = sum(self.num_layers[: self.number])
        return range(first, first + self.num_layers[self.number])


WHOLE_PIPELINE = Stage()
"""The only stage: all layers."""


def partition_layers(
    num_layers: int, count: int, stated: str | None, memory: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Return the number of layers of each of `count` pipeline stages, for a model of `num_layers` layers.

    `stated` is the user's list, such as "10,12,10". If it is None, layers are divided evenly, or in proportion to
    `memory`, the bytes that each stage has for them. The first stage also has the embedding and the head, so it is the
    last to get a layer that is left over. Raises `ConfigError` if `stated` or `count` does not fit the model.
    """
    if count > num_layers:
        raise ConfigError(
            f"pipeline_parallel_size is {count}, but the model has {num_layers} layers only: set it to at most"
            f" {num_layers}"
        )
    if stated is not None:
        return _stated(num_layers, count, stated)
    shares = [1.0] * count
    if memory is not None and max(memory) - min(memory) > MEMORY_TOLERANCE * max(memory):
        shares = [max(share, 0.0) for share in memory]
    total = sum(shares) or 1.0
    exact = [num_layers * share / total for share in shares]
    sizes = [max(1, int(size)) for size in exact]
    # The largest remainders get what is left; among equals the first stage comes last.
    order = sorted(range(count), key=lambda i: (sizes[i] - exact[i], i == 0, i))
    while sum(sizes) < num_layers:
        sizes[order[0]] += 1
        order.append(order.pop(0))
    # Stages with hardly any memory were given one layer each, which others have to give up.
    while sum(sizes) > num_layers:
        sizes[sizes.index(max(sizes))] -= 1
    return tuple(sizes)


def _stated(num_layers: int, count: int, stated: str) -> tuple[int, ...]:
    """Return the number of layers of each stage from the setting `stated`, such as "10,12,10". Raises `ConfigError` if
    these are not `count` numbers of at least 1 with the sum `num_layers`.
    """
    try:
        sizes = tuple(int(part) for part in stated.split(","))
    except ValueError as exc:
        raise ConfigError(
            f"pipeline_layer_partition is {stated!r}; it must be a number of layers for each stage, such as 10,12,10"
        ) from exc
    if len(sizes) != count or sum(sizes) != num_layers or min(sizes) < 1:
        raise ConfigError(
            f"pipeline_layer_partition is {stated}, but the model's {num_layers} layers are divided over {count} stages"
            f" (pipeline_parallel_size): state {count} numbers of at least 1 whose sum is {num_layers}"
        )
    return sizes

"""Identifies a rank, and divides numbers of items between ranks."""

from dataclasses import dataclass

STEPS = (128, 64, 32, 16, 8, 4, 2, 1)
"""Multiples at which a width is cut, the best first: tiles of kernels and groups of codes stay whole."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Identifies one rank of a tensor-parallel model: its number among `size` ranks."""

    rank: int = 0
    size: int = 1

    @property
    def is_whole(self) -> bool:
        return self.size == 1

    def part(self, total: int) -> slice:
        """Divide `total` items, such as heads, into equal ranges, and return the range of this rank."""
        share = total // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def part_of_width(self, total: int, least_step: int = 1) -> slice:
        """Divide `total` columns into ranges that begin at multiples of `least_step`, and return this rank's range.

        The ranges are equal if that is possible. Otherwise the first ranks have one step more than the others.
        """
        if not total % (self.size * least_step):
            return self.part(total)
        step = step_of_width(total, self.size, least_step)
        share, more = divmod(total // step, self.size)
        start = self.rank * share + min(self.rank, more)
        return slice(start * step, (start + share + (self.rank < more)) * step)


def step_of_width(total: int, size: int, least_step: int = 1) -> int:
    """Return the largest multiple at which `total` columns can be cut into ranges for `size` ranks; 0: none."""
    steps = (step for step in STEPS if step >= least_step)
    return next((step for step in steps if not total % step and total // step >= size), 0)


UNSHARDED = Shard()
"""The shard of a single rank: everything."""

"""Divides a number of items, such as heads or columns, between tensor-parallel ranks; which part of a weight that is,
is decided in `model/rank_parts.py`.
"""

from dataclasses import dataclass

STEPS = (128, 64, 32, 16, 8, 4, 2, 1)
"""Multiples at which a width is cut, the best first: tiles of kernels and groups of codes stay whole."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Identifies one rank of a tensor-parallel group: its number `rank`, from 0, among `size` ranks."""

    rank: int = 0
    size: int = 1

    @property
    def is_whole(self) -> bool:
        return self.size == 1

    def part(self, total: int) -> slice:
        """Return this rank's range of `total` items, such as heads: each rank gets `total // size` of them, one range
        after another. The caller must know that `size` divides `total`.
        """
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
    """Return the step at which `total` columns are cut for `size` ranks: the largest of `STEPS`, at least `least_step`,
    that divides `total` and leaves each rank one step or more. Return 0 if there is none.
    """
    steps = (step for step in STEPS if step >= least_step)
    return next((step for step in steps if not total % step and total // step >= size), 0)


UNSHARDED = Shard()
"""The shard of a single rank: everything."""

"""Tracks which blocks, and parts of blocks, a fetch still needs. This module is pure.

Part `p` of block `n` has the number `n * parts + p`. The connection determines how many parts a block has.
"""

from collections.abc import Sequence


class Progress:
    """Records which blocks, and which parts of them, one fetch still lacks. The `ConsumerSession` of the
    fetch owns it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.parts = 1
        self.lacking: set[int] = set(range(num_blocks))
        """Numbers of the blocks that are not complete."""
        self.missing: set[int] = set(self.lacking)
        """Numbers of the parts of these blocks that have not arrived."""

    def begin(self, parts: int) -> None:
        """Start an attempt in which each block travels in `parts` parts. Blocks that are not complete need all their
        parts again.
        """
        # The new connection may divide blocks differently, so parts of the previous attempt cannot be matched with its
        # parts.
        self.parts = parts
        self.missing = {index * parts + part for index in self.lacking for part in range(parts)}

    def arrived(self, parts: Sequence[int]) -> list[int]:
        """Record that the parts with these numbers have arrived. Return those of them that had not arrived before."""
        # A part may arrive twice, if an attempt was given up while its copy ran.
        fresh = [part for part in parts if part in self.missing]
        self.missing.difference_update(fresh)
        return fresh

    def whole(self, parts: Sequence[int]) -> list[int]:
        """Return the numbers of the blocks that became complete with `parts`, the numbers of parts that have just
        arrived.
        """
        count, missing = self.parts, self.missing
        # With one part a block, the numbers are equal; this is the usual case and needs no set.
        numbers = parts if count == 1 else {part // count for part in parts}
        whole = [n for n in sorted(numbers) if missing.isdisjoint(range(n * count, (n + 1) * count))]
        self.lacking.difference_update(whole)
        return whole

    def check_invariants(self) -> None:
        assert {part // self.parts for part in self.missing} == self.lacking

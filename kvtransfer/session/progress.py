"""What a fetch still lacks, in blocks and in parts of them. No I/O.

Part `p` of block `n` has the number `n * parts + p`; how many parts a block has is the connection's. Part `p` of all
blocks is a group: of layers.
"""

from collections.abc import Sequence


class Progress:
    def __init__(self, num_blocks: int) -> None:
        self.parts = 1
        self.lacking: set[int] = set(range(num_blocks))
        """Blocks that are not whole."""
        self.missing: set[int] = set(self.lacking)
        """Their parts."""
        self._in_groups = [num_blocks]
        """Missing parts, by group."""
        self._reached = 0

    def begin(self, parts: int) -> None:
        """An attempt: blocks that are not whole lack all their parts again."""
        self.parts = parts
        self.missing = {index * parts + part for index in self.lacking for part in range(parts)}
        self._in_groups = [len(self.lacking)] * parts
        self._reached = 0

    def arrived(self, parts: Sequence[int]) -> list[int]:
        """Returns those of these parts that were missing."""
        fresh = [part for part in parts if part in self.missing]
        self.missing.difference_update(fresh)
        for part in fresh:
            self._in_groups[part % self.parts] -= 1
        return fresh

    def reached(self) -> int:
        """So many leading groups are here, of all blocks."""
        while self._reached < self.parts and not self._in_groups[self._reached]:
            self._reached += 1
        return self._reached

    def whole(self, parts: Sequence[int]) -> list[int]:
        """Blocks of which these parts, just arrived, were the last."""
        count, missing = self.parts, self.missing
        numbers = parts if count == 1 else {part // count for part in parts}
        whole = [n for n in sorted(numbers) if missing.isdisjoint(range(n * count, (n + 1) * count))]
        self.lacking.difference_update(whole)
        return whole

    def check_invariants(self) -> None:
        assert {part // self.parts for part in self.missing} == self.lacking
        assert sum(self._in_groups) == len(self.missing)
        assert all(part % self.parts >= self.reached() for part in self.missing)

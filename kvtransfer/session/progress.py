"""What a fetch still lacks, in blocks and in parts of them. No I/O.

Part `p` of block `n` has the number `n * parts + p`; how many parts a block has is the connection's.
"""

from collections.abc import Sequence


class Progress:
    def __init__(self, num_blocks: int) -> None:
        self.parts = 1
        self.lacking: set[int] = set(range(num_blocks))
        """Blocks that are not whole."""
        self.missing: set[int] = set(self.lacking)
        """Their parts."""

    def begin(self, parts: int) -> None:
        """An attempt: blocks that are not whole lack all their parts again."""
        self.parts = parts
        self.missing = {index * parts + part for index in self.lacking for part in range(parts)}

    def arrived(self, parts: Sequence[int]) -> list[int]:
        """Returns those of these parts that were missing."""
        fresh = [part for part in parts if part in self.missing]
        self.missing.difference_update(fresh)
        return fresh

    def whole(self, parts: Sequence[int]) -> list[int]:
        """Blocks of which these parts, just arrived, were the last."""
        count, missing = self.parts, self.missing
        numbers = parts if count == 1 else {part // count for part in parts}
        whole = [n for n in sorted(numbers) if missing.isdisjoint(range(n * count, (n + 1) * count))]
        self.lacking.difference_update(whole)
        return whole

    def check_invariants(self) -> None:
        assert {part // self.parts for part in self.missing} == self.lacking

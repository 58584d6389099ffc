"""Checksums of blocks that lie in host memory, found once for as long as a place holds the same bytes.

A prefix that many instances fetch is then hashed by each of them while it is copied, and by its producer once.
"""

from collections.abc import Sequence

from baton_serve.kvtransfer.memory import BlockMemory, version_of
from baton_serve.kvtransfer.native.copyhash import copy_hash


class ChecksumCache:
    """Of one node, for all its links; used from several threads. A sum found twice is the same."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], tuple[int, int]] = {}
        """By bytes of a block (or part of one) and its number: the version that was hashed, and its sum."""

    def of(self, memory: BlockMemory, blocks: Sequence[int], addresses: Sequence[int]) -> list[int]:
        """xxh3_64 of each. Its owner keeps all of them as they are meanwhile."""
        size = memory.block_bytes
        if not blocks or version_of(memory, blocks[0]) is None:
            return copy_hash().checksums(addresses, size)
        versions = [version_of(memory, block) for block in blocks]
        sums = [self._find(size, block, version) for block, version in zip(blocks, versions, strict=True)]
        lacking = [place for place, known in enumerate(sums) if known is None]
        if lacking:
            found = copy_hash().checksums([addresses[place] for place in lacking], size)
            for place, value in zip(lacking, found, strict=True):
                sums[place] = value
                version = versions[place]
                if version is not None:
                    self._kept[size, blocks[place]] = (version, value)
        return [value for value in sums if value is not None]

    def knows(self, memory: BlockMemory, blocks: Sequence[int]) -> bool:
        """`of` would read none of them."""
        return all(self._find(memory.block_bytes, block, version_of(memory, block)) is not None for block in blocks)

    def _find(self, size: int, block: int, version: int | None) -> int | None:
        kept = self._kept.get((size, block))
        return kept[1] if kept is not None and kept[0] == version else None

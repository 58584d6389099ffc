"""Keeps the checksums of blocks in host memory, so that each is computed once.

If many instances fetch the same prefix, the producer hashes it once. Each consumer hashes it while it copies.
"""

from collections.abc import Sequence

from baton_serve.kvtransfer.block_memory import BlockMemory, version_of
from baton_serve.kvtransfer.native.copyhash import copy_hash


class ChecksumCache:
    """Remembers the checksums of a node's blocks in host memory, so that each is computed once for all consumers.
    Several threads use it without a lock: if two compute the same checksum at the same time, they get the same value.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], tuple[int, int]] = {}
        """The version of the content that was hashed, and its checksum, by the size of the block or part and its
        number.
        """

    def of(self, memory: BlockMemory, blocks: Sequence[int], addresses: Sequence[int]) -> list[int]:
        """Return the xxh3_64 checksum of each of these blocks of `memory`, cached or computed. `addresses` are those of
        their first bytes. The caller must keep the blocks unchanged meanwhile.
        """
        size = memory.block_bytes
        # Without versions, new content in a place could not be noticed: compute every checksum.
        if not blocks or version_of(memory, blocks[0]) is None:
            return copy_hash().checksums(addresses, size)
        versions = [version_of(memory, block) for block in blocks]
        sums = [self._find(size, block, version) for block, version in zip(blocks, versions, strict=True)]
        # One call hashes all of them: each call gives up the GIL once.
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
        """Return whether the current checksums of all these blocks of `memory` are cached, so that `of` would read no
        bytes.
        """
        return all(self._find(memory.block_bytes, block, version_of(memory, block)) is not None for block in blocks)

    def _find(self, size: int, block: int, version: int | None) -> int | None:
        kept = self._kept.get((size, block))
        return kept[1] if kept is not None and kept[0] == version else None

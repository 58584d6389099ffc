"""The checksum of a block is computed once, and again after its place was reused."""

import pytest

from baton_serve.kvtransfer.block_memory import HostMemory, PartitionedMemory, address_of
from baton_serve.kvtransfer.transports.checksum_cache import ChecksumCache

SIZE = 8192


@pytest.fixture
def memory() -> HostMemory:
    made = HostMemory(4, SIZE)
    made.versions = [0] * 4
    for block in range(4):
        made.block(block)[:] = bytes([block]) * SIZE
    return made


def sums(kept: ChecksumCache, memory: HostMemory | PartitionedMemory, *blocks: int) -> list[int]:
    assert memory.host_view is not None
    start = address_of(memory.host_view)
    return kept.of(memory, blocks, [start + block * memory.block_bytes for block in blocks])


def test_a_sum_is_kept_until_its_place_is_given_out_again(memory: HostMemory) -> None:
    kept = ChecksumCache()
    first = sums(kept, memory, 1, 2)
    assert kept.knows(memory, [2, 1]) and not kept.knows(memory, [1, 3])
    memory.block(1)[:] = memory.block(2)[:] = bytes([9]) * SIZE
    assert memory.versions is not None
    memory.versions[2] += 1
    assert not kept.knows(memory, [2])
    again = sums(kept, memory, 1, 2, 3)
    assert again[0] == first[0], "nobody said that it holds something else"
    assert again[1] != first[1]
    assert len(set(again)) == 3


def test_where_nobody_counts_nothing_is_kept(memory: HostMemory) -> None:
    kept, memory.versions = ChecksumCache(), None
    first = sums(kept, memory, 1)
    assert not kept.knows(memory, [1])
    memory.block(1)[:] = bytes([9]) * SIZE
    assert sums(kept, memory, 1) != first


def test_parts_have_sums_of_their_own_and_the_version_of_their_block(memory: HostMemory) -> None:
    kept, parts = ChecksumCache(), PartitionedMemory(memory, 2)
    sums(kept, memory, 1)
    assert not kept.knows(parts, [1])
    memory.block(1)[SIZE // 2 :] = bytes([9]) * (SIZE // 2)
    assert len(set(sums(kept, parts, 2, 3))) == 2
    assert kept.knows(parts, [2, 3])
    assert memory.versions is not None
    memory.versions[1] += 1
    assert not kept.knows(parts, [2]) and not kept.knows(parts, [3])

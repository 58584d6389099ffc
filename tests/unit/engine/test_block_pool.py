from baton_serve.contracts.events import BlocksRemoved, BlocksStored
from baton_serve.contracts.identity import BlockHash
from baton_serve.engine.core.block_pool import BlockPool


def name(number: int) -> BlockHash:
    return BlockHash(bytes([number]) * 16)


def test_block_zero_is_never_given_out() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.allocate(1) is None
    pool.check_invariants([1, 2, 3])


def test_too_large_an_allocation_takes_nothing() -> None:
    pool = BlockPool(4)
    assert pool.allocate(4) is None
    assert pool.num_free == 3


def test_a_released_block_is_found_again_under_its_name() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    assert blocks
    pool.register([name(1), name(2)], blocks)
    pool.release(blocks)
    assert pool.match([name(1), name(2), name(3)]) == blocks
    assert pool.num_free == 3
    pool.check_invariants([])


def test_matching_stops_at_the_first_miss() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(1)
    assert blocks
    pool.register([name(2)], blocks)
    assert pool.match([name(1), name(2)]) == []


def test_nameless_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(4)
    cached, plain = pool.allocate(1), pool.allocate(1)
    assert cached and plain
    pool.register([name(1)], cached)
    pool.release(cached)
    pool.release(plain)
    assert pool.allocate(2) == [plain[0], 3]
    assert pool.match([name(1)]) == cached
    pool.check_invariants([plain[0], 3])


def test_the_end_of_a_prefix_is_evicted_before_its_start() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    assert blocks
    names = [name(1), name(2), name(3)]
    pool.register(names, blocks)
    pool.release(blocks)
    pool.allocate(1)
    assert pool.match(names) == blocks[:2]


def test_the_least_recently_released_prefix_is_evicted_first() -> None:
    pool = BlockPool(3)
    old, new = pool.allocate(1), pool.allocate(1)
    assert old and new
    pool.register([name(1)], old)
    pool.register([name(2)], new)
    pool.release(new)
    pool.release(old)
    pool.allocate(1)
    assert pool.match([name(1)]) == old
    assert pool.match([name(2)]) == []


def test_a_shared_block_is_free_only_after_its_last_owner() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks
    pool.register([name(1)], blocks)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.allocate(1) is None
    pool.check_invariants(blocks)
    pool.release(blocks)
    assert pool.num_free == 1


def test_a_second_block_of_the_same_name_stays_nameless() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    assert blocks
    pool.register([name(1)], blocks[:1])
    pool.register([name(1)], blocks[1:])
    assert pool.match([name(1)]) == blocks[:1]
    assert pool.take_events() == [BlocksStored([name(1)])]
    pool.check_invariants(blocks)


def test_events_report_stored_and_removed_blocks_in_order() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks
    pool.register([name(1)], blocks)
    pool.release(blocks)
    assert pool.allocate(1) == blocks
    pool.register([name(2)], blocks)
    assert pool.take_events() == [BlocksStored([name(1)]), BlocksRemoved([name(1)]), BlocksStored([name(2)])]
    assert not pool.has_events


def test_without_caching_nothing_is_ever_matched() -> None:
    pool = BlockPool(2, caching=False)
    blocks = pool.allocate(1)
    assert blocks
    pool.register([name(1)], blocks)
    assert pool.match([name(1)]) == []
    assert pool.take_events() == []


def test_the_hottest_are_those_found_most_often_then_those_used_last() -> None:
    pool = BlockPool(8)
    for number in (1, 3, 5):
        blocks = pool.allocate(2)
        assert blocks
        pool.register([name(number), name(number + 1)], blocks)
        pool.release(blocks)
    found = pool.match([name(3)])
    pool.share(found)
    pool.release(found)
    assert pool.hot_block_hashes(9) == [name(3), name(5), name(6), name(4), name(1), name(2)]
    assert pool.hot_block_hashes(1) == [name(3)]


def test_a_block_has_another_version_whenever_it_is_given_out() -> None:
    versions = [0] * 3
    pool = BlockPool(3, versions=versions)
    blocks = pool.allocate(2)
    assert blocks is not None and versions == [0, 1, 1]
    pool.register([name(0)], blocks[:1])
    pool.release(blocks)
    pool.share(pool.match([name(0)]))
    assert versions == [0, 1, 1], "shared blocks hold what they held"
    pool.release(blocks[:1])
    assert pool.allocate(2) is not None and versions == [0, 2, 2]

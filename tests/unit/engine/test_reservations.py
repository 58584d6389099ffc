from collections.abc import Iterator

import pytest

from baton_serve.contracts.block_hash import hash_blocks
from baton_serve.contracts.identity import RequestId
from baton_serve.engine.core.request_table import RequestTable
from baton_serve.engine.core.reservations import Reservations
from baton_serve.engine.core.scheduler import Scheduler
from baton_serve.engine.errors import RequestError, UsageError
from tests.unit.engine.work import (
    BLOCK_TOKENS,
    EOS,
    ROOT,
    add,
    expected_tokens,
    make_table,
    make_work,
    run_to_end,
    step,
)

A = RequestId("a")


@pytest.fixture
def table() -> Iterator[RequestTable]:
    table = make_table()
    yield table
    table.check_invariants()


@pytest.fixture
def scheduler(table: RequestTable) -> Scheduler:
    return Scheduler(table)


@pytest.fixture
def reservations(table: RequestTable) -> Reservations:
    return Reservations(table)


def test_a_reserved_request_goes_on_after_its_first_token(
    table: RequestTable, scheduler: Scheduler, reservations: Reservations
) -> None:
    work = make_work("a", list(range(1, 11)), max_tokens=5)
    reservation = reservations.reserve(work, 0.0)
    assert reservation is not None
    assert reservation.names == hash_blocks(ROOT, work.token_ids, BLOCK_TOKENS)
    assert [name for name, _ in reservation.missing] == reservation.names
    assert not scheduler.has_work()
    reservations.mark_received(A, reservation.names)
    reservations.admit(A, {0: 7})
    assert [t for o in _outputs(table, scheduler) for t in o] == expected_tokens("a", 0, 5)[1:]


def _outputs(table: RequestTable, scheduler: Scheduler) -> list[list[int]]:
    found = []
    while scheduler.has_work():
        found += [output.token_ids for output in step(table, scheduler).tokens]
    return found


def test_received_blocks_are_cached_for_the_next_request(reservations: Reservations) -> None:
    first = reservations.reserve(make_work("a", [1] * 10), 0.0)
    assert first is not None
    reservations.mark_received(A, first.names[:2])
    second = reservations.reserve(make_work("b", [1] * 9), 0.0)
    assert second is not None
    assert second.reused == 2
    assert len(second.missing) == 1


def test_no_room_is_none_and_takes_nothing(table: RequestTable, reservations: Reservations) -> None:
    assert reservations.reserve(make_work("a", [1] * 60), 0.0)
    free = table.pool.num_free
    assert reservations.reserve(make_work("b", [2] * 8), 0.0) is None
    assert table.pool.num_free == free
    assert RequestId("b") not in table.requests


def test_a_request_cannot_be_admitted_before_its_blocks_are_there(reservations: Reservations) -> None:
    reservation = reservations.reserve(make_work("a", [1] * 8), 0.0)
    assert reservation is not None
    reservations.mark_received(A, reservation.names[:1])
    with pytest.raises(UsageError, match="1 blocks have not been received"):
        reservations.admit(A, {0: 1})


def test_a_block_is_received_once(reservations: Reservations) -> None:
    reservation = reservations.reserve(make_work("a", [1] * 8), 0.0)
    assert reservation is not None
    reservations.mark_received(A, reservation.names[:1])
    with pytest.raises(UsageError, match="is not missing"):
        reservations.mark_received(A, reservation.names[:1])


def test_after_a_failed_handoff_the_received_blocks_are_not_computed_again(
    table: RequestTable, scheduler: Scheduler, reservations: Reservations
) -> None:
    reservation = reservations.reserve(make_work("a", [1] * 13), 0.0)
    assert reservation is not None
    reservations.mark_received(A, reservation.names[:2])
    reservations.admit_locally(A)
    (chunk,) = scheduler.schedule(0.0).chunks
    assert (chunk.start, chunk.length) == (8, 5)


def test_a_first_token_that_ends_its_sequence_starts_nothing(
    table: RequestTable, scheduler: Scheduler, reservations: Reservations
) -> None:
    reservation = reservations.reserve(make_work("a", [1] * 6, sequences=2), 0.0)
    assert reservation is not None
    reservations.mark_received(A, reservation.names)
    reservations.admit(A, {0: EOS, 1: 5})
    assert [s.index for s in table.running] == [1]
    run_to_end_from(table, scheduler)


def run_to_end_from(table: RequestTable, scheduler: Scheduler) -> None:
    _outputs(table, scheduler)
    assert not table.requests
    assert table.pool.num_free == table.pool.num_total


def test_cancelling_a_reservation_frees_it(table: RequestTable, reservations: Reservations) -> None:
    assert reservations.reserve(make_work("a", [1] * 20), 0.0)
    table.cancel(A, None)
    assert table.pool.num_free == table.pool.num_total


def test_a_request_id_is_used_once(table: RequestTable) -> None:
    add(table, make_work("a", [1]))
    with pytest.raises(RequestError, match="already in use"):
        add(table, make_work("a", [1]))


def test_pinned_blocks_outlive_everything_until_unpinned(
    table: RequestTable, scheduler: Scheduler, reservations: Reservations
) -> None:
    add(table, make_work("a", [1] * 8))
    run_to_end(table, scheduler)
    names = hash_blocks(ROOT, [1] * 8, BLOCK_TOKENS)
    pinned = reservations.pin([*names, names[0]])
    assert [item.name for item in pinned] == [*names, names[0]]
    reservations.unpin(names[:1])
    add(table, make_work("b", [2] * 50, max_tokens=5))
    run_to_end(table, scheduler)
    assert table.pool.match(names) == [item.block for item in pinned[:2]]
    reservations.unpin(names)
    with pytest.raises(UsageError, match="not pinned"):
        reservations.unpin(names)

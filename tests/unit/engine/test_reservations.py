from collections.abc import Iterator

import pytest

from contracts.identity import RequestId
from contracts.naming import block_names
from engine.errors import RequestError, UsageError
from engine.reservations import Reservations
from engine.roster import Roster
from engine.scheduler import Scheduler
from tests.unit.engine.work import (
    BLOCK_TOKENS,
    EOS,
    ROOT,
    add,
    expected_tokens,
    make_roster,
    make_work,
    run_to_end,
    step,
)

A = RequestId("a")


@pytest.fixture
def roster() -> Iterator[Roster]:
    roster = make_roster()
    yield roster
    roster.check_invariants()


@pytest.fixture
def scheduler(roster: Roster) -> Scheduler:
    return Scheduler(roster)


@pytest.fixture
def reservations(roster: Roster) -> Reservations:
    return Reservations(roster)


def test_a_reserved_request_goes_on_after_its_first_token(
    roster: Roster, scheduler: Scheduler, reservations: Reservations
) -> None:
    work = make_work("a", list(range(1, 11)), max_tokens=5)
    reservation = reservations.reserve(work, 0.0)
    assert reservation is not None
    assert reservation.names == block_names(ROOT, work.token_ids, BLOCK_TOKENS)
    assert [name for name, _ in reservation.missing] == reservation.names
    assert not scheduler.has_work()
    reservations.mark_received(A, reservation.names)
    reservations.admit(A, {0: 7})
    assert [t for o in _outputs(roster, scheduler) for t in o] == expected_tokens("a", 0, 5)[1:]


def _outputs(roster: Roster, scheduler: Scheduler) -> list[list[int]]:
    found = []
    while scheduler.has_work():
        found += [output.token_ids for output in step(roster, scheduler).tokens]
    return found


def test_received_blocks_are_cached_for_the_next_request(reservations: Reservations) -> None:
    first = reservations.reserve(make_work("a", [1] * 10), 0.0)
    assert first is not None
    reservations.mark_received(A, first.names[:2])
    second = reservations.reserve(make_work("b", [1] * 9), 0.0)
    assert second is not None
    assert second.reused == 2
    assert len(second.missing) == 1


def test_no_room_is_none_and_takes_nothing(roster: Roster, reservations: Reservations) -> None:
    assert reservations.reserve(make_work("a", [1] * 60), 0.0)
    free = roster.pool.num_free
    assert reservations.reserve(make_work("b", [2] * 8), 0.0) is None
    assert roster.pool.num_free == free
    assert RequestId("b") not in roster.requests


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
    roster: Roster, scheduler: Scheduler, reservations: Reservations
) -> None:
    reservation = reservations.reserve(make_work("a", [1] * 13), 0.0)
    assert reservation is not None
    reservations.mark_received(A, reservation.names[:2])
    reservations.admit_locally(A)
    (chunk,) = scheduler.schedule(0.0).chunks
    assert (chunk.start, chunk.length) == (8, 5)


def test_a_first_token_that_ends_its_sequence_starts_nothing(
    roster: Roster, scheduler: Scheduler, reservations: Reservations
) -> None:
    reservation = reservations.reserve(make_work("a", [1] * 6, sequences=2), 0.0)
    assert reservation is not None
    reservations.mark_received(A, reservation.names)
    reservations.admit(A, {0: EOS, 1: 5})
    assert [s.index for s in roster.running] == [1]
    run_to_end_from(roster, scheduler)


def run_to_end_from(roster: Roster, scheduler: Scheduler) -> None:
    _outputs(roster, scheduler)
    assert not roster.requests
    assert roster.pool.num_free == roster.pool.num_total


def test_cancelling_a_reservation_frees_it(roster: Roster, reservations: Reservations) -> None:
    assert reservations.reserve(make_work("a", [1] * 20), 0.0)
    roster.cancel(A, None)
    assert roster.pool.num_free == roster.pool.num_total


def test_a_request_id_is_used_once(roster: Roster) -> None:
    add(roster, make_work("a", [1]))
    with pytest.raises(RequestError, match="already in use"):
        add(roster, make_work("a", [1]))


def test_pinned_blocks_outlive_everything_until_unpinned(
    roster: Roster, scheduler: Scheduler, reservations: Reservations
) -> None:
    add(roster, make_work("a", [1] * 8))
    run_to_end(roster, scheduler)
    names = block_names(ROOT, [1] * 8, BLOCK_TOKENS)
    pinned = reservations.pin([*names, names[0]])
    assert [item.name for item in pinned] == [*names, names[0]]
    reservations.unpin(names[:1])
    add(roster, make_work("b", [2] * 50, max_tokens=5))
    run_to_end(roster, scheduler)
    assert roster.pool.match(names) == [item.block for item in pinned[:2]]
    reservations.unpin(names)
    with pytest.raises(UsageError, match="not pinned"):
        reservations.unpin(names)


def test_what_follows_a_front_is_computed_and_the_rest_may_be_received_later(
    roster: Roster, scheduler: Scheduler, reservations: Reservations
) -> None:
    work = make_work("a", list(range(1, 11)), max_tokens=1)
    reservation = reservations.reserve(work, 0.0, "prefill")
    assert reservation is not None
    reservations.mark_received(A, reservation.names[:1])
    reservations.follow(A, BLOCK_TOKENS * 2, 0.0)
    plan = scheduler.schedule(0.0)
    assert [(chunk.start, chunk.length, chunk.is_last) for chunk in plan.chunks] == [(8, 2, True)]
    result = step(roster, scheduler)
    assert [block.name for done in result.completed for block in done.blocks] == reservation.names
    assert [(info.cached_tokens, info.front_tokens) for info in result.first] == [(0, 8)]
    assert reservations.missing_blocks(A)
    reservations.mark_received(A, reservation.names[1:2])
    assert not reservations.missing_blocks(A)
    assert set(roster.pool.cached_names()) == set(reservation.names[:2])
    roster.end_request(roster.requests[A])


def test_a_prompt_whose_front_is_lost_is_computed_from_what_has_come(
    roster: Roster, scheduler: Scheduler, reservations: Reservations
) -> None:
    work = make_work("a", list(range(1, 11)), max_tokens=1)
    reservation = reservations.reserve(work, 0.0, "prefill")
    assert reservation is not None
    reservations.follow(A, BLOCK_TOKENS * 2, 0.0)
    reservations.mark_received(A, reservation.names[:1])
    assert reservations.read_alone(A, 0.0)
    plan = scheduler.schedule(0.0)
    assert [(chunk.start, chunk.length) for chunk in plan.chunks] == [(4, 6)]
    assert run_to_end(roster, scheduler) == {("a", 0): expected_tokens("a", 0, 1)}
    roster.end_request(roster.requests[A])


def test_a_part_shares_what_the_part_before_it_computes(
    roster: Roster, scheduler: Scheduler, reservations: Reservations
) -> None:
    tokens = list(range(1, 24))  # three parts of two blocks, the second of which another instance computes; the last
    add(roster, make_work("p0", tokens[:8], max_tokens=1), "prefill")
    reservation = reservations.reserve(make_work("a", tokens, max_tokens=1), 0.0, "prefill", RequestId("p0"))
    assert reservation is not None
    assert reservation.reused == 0
    assert [name for name, _ in reservation.missing] == reservation.names[2:]
    assert not reservations.share()
    with pytest.raises(UsageError, match="earlier part"):
        reservations.follow(A, 16, 0.0)
    step(roster, scheduler)
    (shared,) = reservations.share()
    assert [name for name, _ in shared.blocks] == reservation.names[:2]
    assert not reservations.share()
    lead = roster.requests[RequestId("p0")]
    assert lead.sequences[0].blocks == [block for _, block in shared.blocks]
    assert roster.requests[A].place == lead.place
    roster.end_request(lead)
    reservations.follow(A, 16, 0.0)
    plan = scheduler.schedule(0.0)
    assert [(chunk.start, chunk.length) for chunk in plan.chunks] == [(16, 7)]
    result = step(roster, scheduler)
    (done,) = result.completed
    assert [name for name, _ in done.blocks] == reservation.names[2:], "what was shared has been told of"
    assert [(info.cached_tokens, info.front_tokens) for info in result.first] == [(0, 8)]
    roster.end_request(roster.requests[A])


def test_a_part_is_reserved_after_one_that_is_here_and_of_the_same_prompt(
    roster: Roster, reservations: Reservations
) -> None:
    add(roster, make_work("p0", [1] * 8, max_tokens=1), "prefill")
    work = make_work("a", [1] * 7 + [2] * 8, max_tokens=1)
    for after in ("p0", "p1"):
        assert reservations.reserve(work, 0.0, "prefill", RequestId(after)) is None
    roster.end_request(roster.requests[RequestId("p0")])


def test_a_part_that_comes_early_leaves_those_who_wait_their_memory(roster: Roster, reservations: Reservations) -> None:
    add(roster, make_work("p0", [1] * 24, max_tokens=1), "prefill")  # 6 of 16 blocks
    add(roster, make_work("b", [2] * 16, max_tokens=1), "prefill")  # 4
    assert reservations.reserve(make_work("a", [1] * 53, max_tokens=1), 0.0, "prefill", RequestId("p0")) is None
    assert reservations.reserve(make_work("a", [1] * 45, max_tokens=1), 0.0, "prefill", RequestId("p0")) is not None
    for request in list(roster.requests.values()):
        roster.end_request(request)


def test_a_part_whose_lead_ends_computes_its_blocks_too_where_there_is_room(
    roster: Roster, scheduler: Scheduler, reservations: Reservations
) -> None:
    add(roster, make_work("p0", [1] * 16, max_tokens=1), "prefill")
    reservation = reservations.reserve(make_work("a", [1] * 30, max_tokens=1), 0.0, "prefill", RequestId("p0"))
    assert reservation is not None
    reservations.mark_received(A, reservation.names[4:5])
    step(roster, scheduler)  # half of the first part
    reservations.share()
    roster.end_request(roster.requests[RequestId("p0")])
    taken = roster.pool.allocate(roster.pool.num_free)
    assert taken is not None
    assert not reservations.read_alone(A, 0.0)
    roster.pool.release(taken)
    assert reservations.read_alone(A, 0.0)
    plan = scheduler.schedule(0.0)
    assert [(chunk.start, chunk.length) for chunk in plan.chunks] == [(8, 8)], "what was computed is kept"
    assert run_to_end(roster, scheduler) == {("a", 0): expected_tokens("a", 0, 1)}
    roster.end_request(roster.requests[A])


def test_who_loses_its_front_goes_on_in_its_own_blocks(
    roster: Roster, scheduler: Scheduler, reservations: Reservations
) -> None:
    """They may be read at this moment."""
    reservation = reservations.reserve(make_work("a", list(range(1, 14)), max_tokens=1), 0.0, "prefill")
    assert reservation is not None
    reservations.follow(A, 12, 0.0)
    reservations.mark_received(A, reservation.names[:2])
    assert reservations.read_alone(A, 0.0)
    reservations.mark_received(A, reservation.names[2:3])  # it was on its way
    assert roster.requests[A].front_tokens == 8
    assert [(chunk.start, chunk.length) for chunk in scheduler.schedule(0.0).chunks] == [(8, 5)]
    assert roster.requests[A].sequences[0].blocks == [block for _, block in reservation.missing]
    assert run_to_end(roster, scheduler) == {("a", 0): expected_tokens("a", 0, 1)}
    roster.end_request(roster.requests[A])

"""What the consumer's end tells of groups of layers: those that all wanted blocks have, never what is written again."""

from collections.abc import Callable

import pytest

from kvtransfer.frames import Again, Blocks, Done, Fetch, Piece, Ready
from kvtransfer.session.consumer import ConsumerSession
from kvtransfer.session.progress import Progress
from kvtransfer.session.steps import (
    Ask,
    ConsumerStep,
    Demote,
    Fault,
    Give,
    Reached,
    Relink,
    StopCopies,
    Succeed,
)
from tests.unit.kvtransfer.samples import LIMITS, TICKET, name

PARTS = 4


def streaming(num_blocks: int = 3, *, parts: int = PARTS, pulls: bool = False) -> ConsumerSession:
    wanted = [(name(index), 10 + index) for index in range(num_blocks)]
    one = ConsumerSession(TICKET, wanted, now=0.0, limits=LIMITS, tells_groups=True)
    one.linked("usm", pulls=pulls, now=0.0, parts=parts)
    one.handle(Ready(TICKET.ticket, 1, True), 0.0)
    return one


def announce(one: ConsumerSession, numbers: list[int], parts: int = PARTS, attempt: int = 1) -> None:
    one.handle(Blocks(TICKET.ticket, attempt, [Piece(number, number, None) for number in numbers], parts=parts), 0.0)


def come(one: ConsumerSession, blocks: list[int], part: int | None = None) -> list[Reached]:
    """Whole, or a part of each; what is told then."""
    numbers = blocks if part is None else [block * PARTS + part for block in blocks]
    announce(one, numbers, 1 if part is None else PARTS)
    steps = one.copied([block * PARTS + (part or 0) for block in blocks], 0.0)
    one.check_invariants()
    return [step for step in steps if isinstance(step, Reached)]


def done(num_blocks: int, attempt: int = 1) -> Done:
    return Done(ticket=TICKET.ticket, attempt=attempt, num_blocks=num_blocks, payload=b"p", finished_at=1.0)


def reached(number: int) -> list[Reached]:
    return [Reached(number, PARTS)]


def test_a_group_is_told_of_when_all_blocks_have_it() -> None:
    one = streaming()
    assert come(one, [0, 1], 0) == []
    assert come(one, [2], 0) == reached(1)
    for part in range(1, PARTS):
        assert come(one, [0, 1, 2], part) == reached(part + 1)
    assert isinstance(one.handle(done(3 * PARTS), 0.0)[0], Succeed)


def test_groups_in_any_order_are_told_of_from_the_first_on() -> None:
    one = streaming()
    assert come(one, [0, 1, 2], 2) == []
    assert come(one, [0, 1, 2], 1) == []
    assert come(one, [0, 1, 2], 0) == reached(3)


def test_a_whole_block_has_all_groups() -> None:
    one = streaming()
    assert come(one, [0]) == []
    assert come(one, [1, 2], 0) == reached(1)
    assert come(one, [1], 1) == []
    assert come(one, [2], 1) == reached(2)
    assert come(one, [2], 2) == [] and come(one, [2], 3) == []
    assert come(one, [1], 2) == reached(3)
    assert come(one, [1], 3) == reached(4)


def test_blocks_that_come_whole_are_told_of_once() -> None:
    one = streaming()
    assert [come(one, [block]) for block in range(3)] == [[], [], reached(PARTS)]
    two = streaming(2, parts=1)
    announce(two, [0, 1], 1)
    assert two.copied([0], 0.0)[1:] == []
    assert two.copied([1], 0.0)[1:] == [Reached(1, 1)]


def test_no_block_is_told_of_before_the_end() -> None:
    steps = streaming(0).handle(done(0), 0.0)
    assert steps[0] == Reached(PARTS, PARTS) and isinstance(steps[1], Succeed)


def test_nobody_is_told_who_did_not_ask() -> None:
    one = ConsumerSession(TICKET, [(name(0), 0)], now=0.0, limits=LIMITS)
    one.linked("usm", pulls=True, now=0.0, parts=PARTS)
    for part in range(PARTS):
        assert come(one, [0], part) == []


LOSSES: dict[str, Callable[[ConsumerSession], list[ConsumerStep]]] = {
    "link": lambda one: one.link_lost("reset", dead=False, now=0.1),
    "transport": lambda one: one.transport_lost("broke", 0.1),
    "ticket": lambda one: one.forgotten(1, 0.1),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_after_a_group_was_told_of_there_is_no_other_attempt(loss: str) -> None:
    one = streaming()
    come(one, [0, 1, 2], 0)
    announce(one, [1])
    steps = LOSSES[loss](one)
    assert steps[0] == StopCopies()
    assert not any(isinstance(step, Relink | Give) for step in steps)
    assert [step for step in steps if isinstance(step, Demote)] == [Demote("usm", "broke")] * (loss == "transport")
    end = one.copied([1], 0.2)[-1]  # it was running
    assert isinstance(end, Give) and end.fault is Fault.LOST and "cannot be fetched again" in end.reason
    assert one.is_over()


@pytest.mark.parametrize("loss", LOSSES)
def test_before_a_group_was_told_of_it_is_tried_again(loss: str) -> None:
    one = streaming()
    come(one, [0, 1], 0)
    announce(one, [2 * PARTS])
    assert isinstance(LOSSES[loss](one)[1], Relink)
    assert not any(isinstance(step, Reached) for step in one.copied([2 * PARTS], 0.2))  # to be fetched again
    [ask] = one.linked("zeromq", pulls=False, now=0.3, parts=PARTS)
    assert isinstance(ask, Ask) and isinstance(ask.message, Fetch) and len(ask.message.names) == 3
    announce(one, [0, 1, 2], 1, attempt=2)
    assert one.copied([0, PARTS, 2 * PARTS], 0.4)[1:] == reached(PARTS)


def test_whole_blocks_that_nobody_was_told_of_are_kept_by_the_next_attempt() -> None:
    one = streaming()
    come(one, [0, 2])
    come(one, [1], 1)
    one.link_lost("reset", dead=False, now=0.1)
    [ask] = one.linked("usm", pulls=False, now=0.3, parts=2)
    assert isinstance(ask, Ask) and isinstance(ask.message, Fetch) and ask.message.names == [name(1)]
    announce(one, [0], 2, attempt=2)
    assert one.copied([2], 0.4) == [Reached(1, 2)]
    announce(one, [1], 2, attempt=2)
    assert one.copied([3], 0.4)[1:] == [Reached(2, 2)]


def test_once_all_blocks_are_whole_the_payload_can_be_asked_for_again() -> None:
    one = streaming()
    for part in range(PARTS):
        come(one, [0, 1, 2], part)
    assert isinstance(one.link_lost("reset", dead=False, now=0.1)[1], Relink)
    [ask] = one.linked("usm", pulls=False, now=0.3, parts=2)
    assert isinstance(ask, Ask) and isinstance(ask.message, Fetch) and ask.message.names == []
    assert isinstance(one.handle(done(0, attempt=2), 0.4)[0], Succeed)


def test_the_last_blocks_may_land_after_their_connection() -> None:
    one = streaming(1)
    come(one, [0], 0)
    announce(one, [1, 2, 3])
    assert isinstance(one.copied([1, 2, 3], 0.1)[1], Reached)
    late = streaming(1)
    announce(late, [0], 1)
    late.link_lost("reset", dead=False, now=0.1)
    assert late.copied([0], 0.2)[1:] == reached(PARTS)


def test_a_damaged_part_alone_is_asked_for_again() -> None:
    one = streaming()
    come(one, [0, 1, 2], 0)
    announce(one, [1, PARTS + 1, 2 * PARTS + 1])
    assert one.damaged([PARTS + 1], 0.0) == [Ask(Again(TICKET.ticket, 1, [PARTS + 1]))]
    assert one.copied([1, 2 * PARTS + 1], 0.0) == []
    announce(one, [0, PARTS], PARTS)  # what was told of is placed no more
    assert come(one, [1], 1) == reached(2)


def test_a_transport_that_damages_after_a_group_was_told_of_is_demoted_and_the_end() -> None:
    one = streaming()
    come(one, [0, 1, 2], 0)
    for _ in range(LIMITS.max_mismatches):
        announce(one, [1])
        steps = one.damaged([1], 0.0)
    assert steps[1] == Demote("usm", "bytes did not match their checksum")
    assert isinstance(steps[-1], Give) and steps[-1].fault is Fault.CORRUPT


def test_a_copy_that_outlived_the_lease_is_not_told_of() -> None:
    one = streaming(pulls=True)
    come(one, [0, 1, 2], 0)
    announce(one, [1, PARTS + 1, 2 * PARTS + 1])
    steps = one.copied([1, PARTS + 1, 2 * PARTS + 1], LIMITS.lease_s + 0.1)
    assert not any(isinstance(step, Reached) for step in steps)
    assert isinstance(steps[-1], Give) and steps[-1].fault is Fault.LOST


def test_groups_are_counted_by_what_arrived_alone() -> None:
    progress = Progress(2)
    progress.begin(2)
    assert progress.arrived([0, 2]) == [0, 2] and progress.reached() == 1
    assert progress.arrived([0, 2]) == [] and progress.reached() == 1
    assert progress.whole(progress.arrived([3])) == [1]
    progress.begin(3)
    assert progress.reached() == 0 and progress.missing == {0, 1, 2}
    progress.check_invariants()

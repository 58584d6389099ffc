"""The consumer's end, step by step."""

from baton_serve.kvtransfer.control_messages import Again, Blocks, Done, Fail, Fetch, Piece, Ready, Release
from baton_serve.kvtransfer.session.consumer_session import ConsumerSession
from baton_serve.kvtransfer.session.states import ConsumerState
from baton_serve.kvtransfer.session.steps import (
    Arrived,
    Ask,
    BlockPlacement,
    Copy,
    Fault,
    Give,
    Relink,
    StopCopies,
    Succeed,
)
from tests.unit.kvtransfer.samples import LIMITS, TICKET, name


def session(num_blocks: int = 2, *, partial: bool = False) -> ConsumerSession:
    wanted = [(name(index), 10 + index) for index in range(num_blocks)]
    return ConsumerSession(TICKET, wanted, now=0.0, limits=LIMITS, partial=partial)


def streaming(num_blocks: int = 2, *, partial: bool = False, pulls: bool = True) -> ConsumerSession:
    one = session(num_blocks, partial=partial)
    one.linked("usm", pulls=pulls, now=0.0)
    one.handle(Ready(TICKET.ticket, 1, True), 0.0)
    return one


def blocks(*indexes: int, attempt: int = 1) -> Blocks:
    return Blocks(TICKET.ticket, attempt, [Piece(index, 100 + index, None) for index in indexes])


def done(num_blocks: int, attempt: int = 1) -> Done:
    return Done(ticket=TICKET.ticket, attempt=attempt, num_blocks=num_blocks, payload=b"p", finished_at=1.0)


RECEIVED = Ask(Release(TICKET.ticket, 1, "received"))


def test_a_fetch_names_what_is_wanted_and_places_what_comes() -> None:
    one = session()
    [ask] = one.linked("usm", pulls=True, now=0.0)
    assert isinstance(ask, Ask) and isinstance(ask.message, Fetch)
    assert ask.message.names == [name(0), name(1)]
    assert one.handle(Ready(TICKET.ticket, 1, False), 0.0) == []
    assert one.handle(blocks(1), 0.0) == [Copy(1, [BlockPlacement(1, 0, 101, 11, None)])]
    assert one.copied([1], 0.1) == [Arrived([name(1)])]
    assert one.handle(done(2), 0.1) == []
    one.handle(blocks(0), 0.2)
    assert one.copied([0], 0.3) == [Arrived([name(0)]), Succeed(b"p", 1.0), RECEIVED]
    assert one.is_over()
    one.check_invariants()


def test_done_before_the_last_block_is_not_the_end() -> None:
    one = streaming()
    assert one.handle(done(2), 0.0) == []
    assert one.state is ConsumerState.DRAINING
    one.handle(blocks(0, 1), 0.0)
    assert not any(isinstance(step, Succeed) for step in one.copied([0], 0.0))
    assert one.copied([1], 0.0)[-2] == Succeed(b"p", 1.0)


def test_repeated_late_and_foreign_messages_change_nothing() -> None:
    one = streaming()
    one.handle(blocks(0), 0.0)
    assert one.handle(blocks(0), 0.0) == []
    one.copied([0], 0.0)
    assert one.handle(blocks(0), 0.0) == []
    assert one.handle(blocks(1, attempt=7), 0.0) == []
    assert one.handle(done(2, attempt=0), 0.0) == []
    assert one.state is ConsumerState.STREAMING


def test_a_block_that_was_never_asked_for_is_an_error() -> None:
    steps = streaming().handle(blocks(2), 0.0)
    assert isinstance(steps[-1], Give) and steps[-1].fault is Fault.SOURCE_FAILED


def test_a_producer_that_finishes_short_fails_the_fetch_at_once() -> None:
    one = streaming()
    one.handle(blocks(0), 0.0)
    one.copied([0], 0.0)
    steps = one.handle(done(1), 0.0)
    assert isinstance(steps[-1], Give) and steps[-1].fault is Fault.INCOMPLETE


def test_a_partial_fetch_is_content_with_what_was_served() -> None:
    one = streaming(partial=True)
    one.handle(blocks(1), 0.0)
    one.handle(done(1), 0.0)
    assert one.copied([1], 0.0) == [Arrived([name(1)]), Succeed(b"p", 1.0), RECEIVED]
    assert one.received == [name(1)]


def test_a_fetch_of_nothing_ends_with_done() -> None:
    assert streaming(0).handle(done(0), 0.0) == [Succeed(b"p", 1.0), RECEIVED]


def test_an_end_waits_for_copies_that_run() -> None:
    one = streaming()
    one.handle(blocks(0, 1), 0.0)
    assert one.cancel() == [StopCopies()]
    assert one.copied([0], 0.0) == []
    assert one.abandoned([1], 0.0) == [
        Ask(Release(TICKET.ticket, 1, "cancelled")),
        Give(Fault.CANCELLED, "cancelled"),
    ]
    assert one.cancel() == []


def test_a_damaged_block_is_asked_for_again_and_then_the_transport_is_changed() -> None:
    one = streaming()
    one.handle(blocks(0, 1), 0.0)
    assert one.damaged([1], 0.0) == [Ask(Again(TICKET.ticket, 1, [1]))]
    one.handle(blocks(1), 0.0)
    steps = one.damaged([1], 0.0)
    assert isinstance(steps[1], Relink) and steps[1].demote == "usm"
    assert one.linked("zeromq", pulls=False, now=0.0) == []
    [arrived, ask] = one.copied([0], 0.0)
    assert arrived == Arrived([name(0)])
    assert isinstance(ask, Ask) and isinstance(ask.message, Fetch)
    assert (ask.message.attempt, ask.message.names, ask.message.transport) == (2, [name(1)], "zeromq")


def test_a_broken_connection_is_tried_again_for_the_rest() -> None:
    one = streaming()
    one.handle(blocks(0), 0.0)
    one.copied([0], 0.0)
    assert one.link_lost("reset", dead=False, now=1.0) == [StopCopies(), Relink("reset")]
    [ask] = one.linked("usm", pulls=True, now=1.1)
    assert isinstance(ask, Ask) and isinstance(ask.message, Fetch)
    assert (ask.message.attempt, ask.message.names) == (2, [name(1)])
    one.handle(blocks(0, attempt=2), 1.2)
    one.handle(done(1, attempt=2), 1.2)
    assert isinstance(one.copied([1], 1.3)[-2], Succeed)


def test_a_dead_peer_or_no_new_connection_ends_the_fetch() -> None:
    steps = streaming().link_lost("killed", dead=True, now=0.0)
    assert isinstance(steps[-1], Give) and steps[-1].fault is Fault.LOST
    one = streaming()
    one.link_lost("reset", dead=False, now=0.0)
    assert one.tick(1.9) == []
    steps = one.tick(2.0)
    assert isinstance(steps[-1], Give) and steps[-1].fault is Fault.LOST


def test_attempts_are_bounded() -> None:
    one = streaming()
    for attempt in range(1, LIMITS.max_attempts):
        one.link_lost("reset", dead=False, now=0.0)
        one.linked("usm", pulls=True, now=0.0)
        assert one.attempt == attempt + 1
    one.link_lost("reset", dead=False, now=0.0)
    steps = one.linked("usm", pulls=True, now=0.0)
    assert isinstance(steps[-1], Give) and steps[-1].fault is Fault.LOST


def test_a_copy_that_outlived_the_lease_does_not_count() -> None:
    one = streaming()
    one.handle(blocks(0), 0.0)
    steps = one.copied([0], LIMITS.lease_s + 0.1)
    assert isinstance(steps[1], Relink) and one.received == []
    pushed = streaming(pulls=False)
    pushed.handle(blocks(0), 0.0)
    assert pushed.copied([0], LIMITS.lease_s + 0.1) == [Arrived([name(0)])]


def test_nor_does_one_that_outlived_its_connection_and_the_lease() -> None:
    one = streaming()
    one.handle(blocks(0), 0.0)
    one.link_lost("reset", dead=False, now=1.0)
    one.linked("zeromq", pulls=False, now=1.1)
    [ask] = one.copied([0], LIMITS.lease_s + 0.1)
    assert isinstance(ask, Ask) and isinstance(ask.message, Fetch) and ask.message.names == [name(0), name(1)]
    late = streaming()
    late.handle(blocks(0), 0.0)
    late.link_lost("reset", dead=False, now=1.0)
    assert late.copied([0], LIMITS.lease_s + 0.1) == []


def test_only_confirmed_renewals_extend_the_lease() -> None:
    one = streaming()
    one.renewed(sent_at=3.0)
    one.handle(blocks(0), 3.0)
    assert one.copied([0], 3.0 + LIMITS.lease_s - 0.1) == [Arrived([name(0)])]


def test_refusals_and_failures_name_their_reason() -> None:
    faults = {"busy": Fault.REFUSED, "failed": Fault.SOURCE_FAILED, "cancelled": Fault.SOURCE_FAILED}
    for code, fault in (faults | {"expired": Fault.TIMEOUT}).items():
        steps = streaming().handle(Fail(TICKET.ticket, 1, code, "because"), 0.0)  # type: ignore[arg-type]
        assert steps[-1] == Give(fault, "because")


def test_every_state_has_its_deadline() -> None:
    linking = session()
    assert isinstance(linking.tick(LIMITS.connect_timeout_s)[-1], Give)
    requested = session()
    requested.linked("usm", pulls=True, now=0.0)
    assert isinstance(requested.tick(LIMITS.answer_timeout_s)[-1], Relink)
    slow = streaming()
    assert slow.tick(TICKET.timeout_s - 0.1) == []
    steps = slow.tick(TICKET.timeout_s)
    assert isinstance(steps[-1], Give) and steps[-1].fault is Fault.TIMEOUT
    assert slow.tick(100.0) == []


def test_a_producer_that_forgot_the_ticket_is_asked_anew() -> None:
    one = streaming()
    assert one.forgotten(0, 0.0) == []
    assert isinstance(one.forgotten(1, 0.0)[-1], Relink)


def in_parts(*indexes: int, parts: int) -> Blocks:
    return Blocks(TICKET.ticket, 1, [Piece(index, 100 + index, None) for index in indexes], parts=parts)


def test_blocks_and_parts_of_blocks_come_over_one_connection() -> None:
    one = session(3)
    one.linked("usm", pulls=True, now=0.0, parts=2)
    one.handle(Ready(TICKET.ticket, 1, True), 0.0)
    assert one.handle(in_parts(0, 1, parts=1), 0.0) == [
        Copy(1, [BlockPlacement(0, 0, 100, 10, None), BlockPlacement(2, 1, 101, 11, None)])
    ]
    assert one.handle(in_parts(1, parts=2), 0.0) == []  # it is on its way
    assert one.copied([0], 0.0) == [Arrived([name(0)])]
    assert one.damaged([2], 0.0) == [Ask(Again(TICKET.ticket, 1, [2, 3]))]
    assert one.handle(in_parts(2, 4, parts=2), 0.0) == [
        Copy(1, [BlockPlacement(2, 0, 102, 22, None, 2), BlockPlacement(4, 1, 104, 24, None, 2)])
    ]
    assert one.copied([2, 4], 0.0) == []
    assert one.handle(in_parts(1, 2, parts=1), 0.0) == []  # half of each is here
    one.handle(in_parts(3, 5, parts=2), 0.0)
    one.handle(done(6), 0.0)
    one.check_invariants()
    assert one.copied([3, 5], 0.0)[0] == Arrived([name(1), name(2)])


def test_parts_that_the_connection_does_not_have_are_an_error() -> None:
    steps = streaming().handle(in_parts(0, parts=3), 0.0)
    assert isinstance(steps[-1], Give) and steps[-1].fault is Fault.SOURCE_FAILED

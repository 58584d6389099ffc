"""The producer's end, step by step."""

from baton_serve.contracts.messages import Ticket
from baton_serve.kvtransfer.control_messages import Again, Done, Fail, Fetch, Ready, Release
from baton_serve.kvtransfer.session.producer_session import ProducerSession
from baton_serve.kvtransfer.session.states import ProducerState
from baton_serve.kvtransfer.session.steps import Drain, ProducerStep, Released, Serve, Tell
from tests.unit.kvtransfer.samples import LIMITS, TICKET, name

LEASE = LIMITS.lease_s + LIMITS.lease_grace_s


def fetch(*indexes: int, attempt: int = 1, timeout_s: float = 20.0) -> Fetch:
    return Fetch(
        ticket=TICKET.ticket,
        attempt=attempt,
        source_generation=TICKET.source_generation,
        transport="usm",
        names=[name(index) for index in indexes],
        timeout_s=timeout_s,
    )


def opened(ticket: Ticket = TICKET) -> ProducerSession:
    return ProducerSession(now=0.0, limits=LIMITS, ticket=ticket)


def streaming(*indexes: int, pulls: bool = True) -> ProducerSession:
    one = opened()
    one.fetch(fetch(*indexes), link=1, pulls=pulls, now=0.0)
    return one


def done(num_blocks: int, attempt: int = 1) -> Tell:
    return Tell(Done(ticket=TICKET.ticket, attempt=attempt, num_blocks=num_blocks, payload=b"p", finished_at=1.0))


def test_wanted_blocks_are_served_as_they_are_published() -> None:
    one = opened()
    assert one.publish([(name(0), 5)]) == []
    ready = Tell(Ready(TICKET.ticket, 1, True))
    assert one.fetch(fetch(1, 0), link=1, pulls=True, now=0.0) == [ready, Serve(1, [(1, 5)])]
    assert one.publish([(name(1), 6), (name(2), 7)]) == [Serve(1, [(0, 6)])]
    assert one.publish([(name(1), 6)]) == []
    assert one.finish(b"p", 1.0) == [done(2)]
    assert one.release(Release(TICKET.ticket, 1, "received")) == [Drain()]
    assert one.quiet() == [Released("received")]
    assert one.is_over()


def ticked(one: ProducerSession, until: float, *, since: float = 0.0) -> list[ProducerStep]:
    """Return the steps that periodic ticks give, from `since` to `until`."""
    steps: list[ProducerStep] = []
    for now in (since + 0.25 * number for number in range(1, int((until - since) / 0.25) + 1)):
        steps += one.tick(now)
    return steps + one.tick(until)


def test_a_fetch_that_comes_first_is_parked_until_the_ticket_is_opened() -> None:
    one = ProducerSession(now=0.0, limits=LIMITS)
    assert one.fetch(fetch(0), link=1, pulls=True, now=0.0) == [Tell(Ready(TICKET.ticket, 1, False))]
    assert one.open(TICKET, 1.0) == []
    assert one.publish([(name(0), 5)]) == [Serve(1, [(0, 5)])]


def test_a_parked_fetch_ends_with_its_own_deadline_or_when_nobody_opens_its_ticket_or_with_its_connection() -> None:
    one = ProducerSession(now=0.0, limits=LIMITS)
    one.fetch(fetch(0, timeout_s=2.0), link=1, pulls=True, now=0.0)
    [reported] = one.tick(2.0)
    assert isinstance(reported, Tell) and isinstance(reported.message, Fail) and reported.message.code == "expired"
    assert one.is_over()
    unknown = ProducerSession(now=0.0, limits=LIMITS)
    unknown.fetch(fetch(0, timeout_s=60.0), link=1, pulls=True, now=0.0)
    assert ticked(unknown, LIMITS.answer_timeout_s - 0.25) == []
    [reported] = ticked(unknown, LIMITS.answer_timeout_s, since=LIMITS.answer_timeout_s - 0.25)
    assert isinstance(reported, Tell) and isinstance(reported.message, Fail) and "opened" in reported.message.reason
    lost = ProducerSession(now=0.0, limits=LIMITS)
    lost.fetch(fetch(0), link=1, pulls=True, now=0.0)
    lost.link_lost(dead=False)
    assert lost.is_over() and lost.reason == "lost"


def test_a_higher_attempt_is_served_from_the_start_and_lower_ones_are_ignored() -> None:
    one = streaming(0, 1)
    one.publish([(name(0), 5), (name(1), 6)])
    one.finish(b"p", 1.0)
    steps = one.fetch(fetch(1, attempt=2), link=2, pulls=False, now=1.0)
    assert steps == [Tell(Ready(TICKET.ticket, 2, True)), Serve(2, [(0, 6)]), done(1, attempt=2)]
    assert one.fetch(fetch(0, attempt=1), link=1, pulls=True, now=1.0) == []
    assert one.link == 2


def test_damaged_blocks_are_served_again() -> None:
    one = streaming(0)
    one.publish([(name(0), 5)])
    assert one.again(Again(TICKET.ticket, 1, [0, 9]), 0.0) == [Serve(1, [(0, 5)])]
    assert one.again(Again(TICKET.ticket, 2, [0]), 0.0) == []


def test_blocks_stay_while_a_consumer_that_reads_them_may_still_copy() -> None:
    one = streaming(0)
    one.publish([(name(0), 5)])
    [reported] = one.give_up("cancelled", "enough")
    assert isinstance(reported, Tell) and isinstance(reported.message, Fail)
    assert one.state is ProducerState.ENDING
    assert one.link_lost(dead=False) == []
    assert ticked(one, LEASE - 0.1) == []
    assert ticked(one, LEASE) == [Drain()]
    assert one.quiet() == [Released("cancelled")]


def test_blocks_of_a_transport_that_pushes_wait_for_the_transport_alone() -> None:
    one = streaming(0, pulls=False)
    assert one.give_up("failed", "no")[-1] == Drain()
    assert one.quiet() == [Released("failed")]


def test_a_silent_consumer_loses_its_claim() -> None:
    one = streaming(0)
    assert one.renew(3.0)
    assert ticked(one, LEASE) == []
    steps = ticked(one, 3.0 + LEASE)
    assert isinstance(steps[0], Tell) and steps[1] == Drain()
    assert one.quiet() == [Released("expired")]
    assert not one.renew(9.0)


def test_a_consumer_whose_connection_broke_may_come_back_within_its_lease() -> None:
    one = streaming(0)
    one.link_lost(dead=False)
    assert one.state is ProducerState.ORPHANED
    assert one.publish([(name(0), 5)]) == []
    steps = one.fetch(fetch(0, attempt=2), link=2, pulls=True, now=1.0)
    assert steps[1:] == [Serve(2, [(0, 5)])]
    one.link_lost(dead=False)
    assert ticked(one, 1.0 + LEASE) == [Drain()]
    assert one.quiet() == [Released("lost")]


def test_a_producer_that_stood_still_or_whose_clock_jumped_waits_for_its_lease_all_the_same() -> None:
    one = streaming(0)
    assert ticked(one, 1.0) == []
    assert one.tick(1.0 + 10.0) == [], "the consumer may be copying"
    assert ticked(one, 10.0 + LEASE - 0.1, since=11.0) == []
    assert ticked(one, 10.0 + LEASE, since=10.0 + LEASE - 0.1)[-1] == Drain()


def test_a_dead_consumer_frees_the_blocks_at_once() -> None:
    one = streaming(0)
    one.link_lost(dead=False)
    assert one.link_lost(dead=True) == [Drain()]
    assert one.quiet() == [Released("lost")]


def test_a_ticket_nobody_fetches_expires_and_answers_late_fetches() -> None:
    one = opened()
    assert one.tick(TICKET.timeout_s) == [Drain()]
    assert one.quiet() == [Released("expired")]
    [reported] = one.fetch(fetch(0), link=1, pulls=True, now=30.0)
    assert isinstance(reported, Tell) and isinstance(reported.message, Fail)


def test_late_calls_of_the_engine_change_nothing() -> None:
    one = streaming(0)
    one.release(Release(TICKET.ticket, 1, "cancelled"))
    assert one.publish([(name(0), 5)]) == []
    assert one.finish(b"p", 1.0) == []
    assert one.give_up("failed", "late") == []
    assert one.quiet() == [Released("cancelled")]
    assert one.quiet() == []


def test_blocks_leave_whole_and_the_tail_in_parts() -> None:
    one = opened()
    one.fetch(fetch(0, 1, 2), link=1, pulls=True, now=0.0, parts=4)
    assert one.publish([(name(0), 5), (name(1), 6)]) == [Serve(1, [(0, 5), (1, 6)])]
    assert one.publish_parts([(name(2), 7)], range(2)) == [Serve(1, [(8, 28), (9, 29)], 4)]
    assert one.publish_parts([(name(0), 5), (name(2), 7)], range(1, 3)) == [Serve(1, [(10, 30)], 4)]
    assert one.publish([(name(2), 7)]) == [Serve(1, [(11, 31)], 4)]
    assert one.finish(b"p", 1.0) == [done(12)]
    assert one.again(Again(TICKET.ticket, 1, [2, 9]), 0.0) == [Serve(1, [(2, 22), (9, 29)], 4)]
    again = one.fetch(fetch(0, 2, attempt=2), link=2, pulls=True, now=0.0, parts=4)
    assert again[1] == Serve(2, [(0, 5), (1, 7)])

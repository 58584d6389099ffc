"""Decisions of a producer about the outcomes of its ranks, and of a consumer whether ranks fetch their parts."""

import pytest

from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.kvtransfer.errors import NodeClosed, PeerLost, SourceFailed, TransferCancelled, TransferTimeout
from baton_serve.kvtransfer.ranks.rank_decisions import (
    MAX_RETRY_S,
    MAX_SOURCES,
    RankAction,
    RankRoutes,
    RankVerdict,
    may_fetch_whole,
    next_action,
)
from baton_serve.kvtransfer.session.steps import ReleaseReason

SOURCE = (InstanceId("prefill-0"), Generation(1))


def decided(
    *ranks: ReleaseReason | None,
    whole: ReleaseReason | None = None,
    is_demoted: bool = False,
    has_waited: bool = False,
) -> RankVerdict:
    return next_action(ranks, whole, is_demoted=is_demoted, has_waited=has_waited)


def test_a_ticket_ends_when_all_ranks_have_ended_and_nobody_can_fetch_whole_blocks_any_more() -> None:
    assert decided(None, None).action is RankAction.WAIT
    assert decided("received", None).action is RankAction.WAIT
    assert decided("received", "received").action is RankAction.END_WHOLE
    assert decided("received", "received", whole="cancelled") == RankVerdict(RankAction.END, "received")


def test_after_a_reported_failure_the_producer_waits_for_a_fetch_of_whole_blocks() -> None:
    assert decided("failed", None).action is RankAction.WAIT
    assert decided("failed", "cancelled").action is RankAction.WAIT_FOR_FETCH
    assert decided("failed", "cancelled", has_waited=True).action is RankAction.END_WHOLE
    assert decided("failed", "cancelled", whole="cancelled") == RankVerdict(RankAction.END, "failed")


def test_with_a_fetch_of_whole_blocks_its_outcome_is_that_of_the_ticket() -> None:
    assert decided(None, "cancelled", is_demoted=True).action is RankAction.WAIT
    assert decided("lost", "cancelled", is_demoted=True).action is RankAction.WAIT
    outcomes: list[ReleaseReason] = ["received", "cancelled", "lost"]
    for outcome in outcomes:
        verdict = decided("lost", "cancelled", whole=outcome, is_demoted=True)
        assert verdict == RankVerdict(RankAction.END, outcome)


@pytest.mark.parametrize("outcome", ["cancelled", "lost", "expired", "closed"])
def test_a_consumer_that_was_cancelled_or_is_gone_fetches_no_whole_blocks(outcome: ReleaseReason) -> None:
    assert decided(outcome, "received").action is RankAction.END_WHOLE
    assert decided(outcome, "received", whole="cancelled") == RankVerdict(RankAction.END, outcome)


@pytest.mark.parametrize("outcome", ["failed", "expired", "closed"])
def test_an_end_of_the_whole_blocks_ends_the_ranks(outcome: ReleaseReason) -> None:
    """The owner has failed the ticket, its time is over, or the node is closed."""
    assert decided(None, "received", whole=outcome).action is RankAction.END_RANKS
    assert decided("cancelled", "cancelled", whole=outcome) == RankVerdict(RankAction.END, outcome)


def test_no_outcomes_in_any_order_leave_a_ticket_without_end() -> None:
    outcomes: list[ReleaseReason] = ["received", "cancelled", "closed", "expired", "lost", "failed"]
    for first in outcomes:
        for second in outcomes:
            for is_demoted in (False, True):
                end = decided(first, second, whole="cancelled", is_demoted=is_demoted)
                assert end.action is RankAction.END
                waiting = decided(first, second, is_demoted=is_demoted, has_waited=True)
                assert waiting.action is (RankAction.WAIT if is_demoted else RankAction.END_WHOLE)


def test_only_failures_of_the_peer_go_on_with_whole_blocks_and_only_within_the_time() -> None:
    assert may_fetch_whole(PeerLost("gone"), remaining_s=0.1)
    assert may_fetch_whole(SourceFailed("a rank"), remaining_s=0.1)
    assert not may_fetch_whole(TransferTimeout("late"), remaining_s=0.0)
    assert not may_fetch_whole(TransferCancelled("by the router"), remaining_s=9.0)
    assert not may_fetch_whole(NodeClosed("stopped"), remaining_s=9.0)


def test_a_way_is_used_only_after_it_was_tried_and_only_one_try_runs_at_a_time() -> None:
    routes = RankRoutes(retry_s=30.0)
    assert not routes.is_open(SOURCE) and routes.begins(SOURCE, 0.0)
    assert not routes.begins(SOURCE, 1.0) and not routes.is_open(SOURCE)
    routes.worked(SOURCE)
    assert routes.is_open(SOURCE) and not routes.begins(SOURCE, 2.0)
    assert routes.open_sources() == {SOURCE[0]}
    another_process = (SOURCE[0], Generation(2))
    assert not routes.is_open(another_process) and routes.begins(another_process, 2.0)


def test_a_failing_source_is_left_alone_for_longer_after_each_failure_and_a_fetch_forgives() -> None:
    routes = RankRoutes(retry_s=30.0)
    assert routes.begins(SOURCE, 0.0)
    routes.failed(SOURCE, 0.0)
    assert not routes.begins(SOURCE, 29.0) and routes.begins(SOURCE, 30.0)
    routes.worked(SOURCE)
    routes.failed(SOURCE, 31.0)
    routes.failed(SOURCE, 32.0)  # ran at the same time as the first
    assert not routes.is_open(SOURCE)
    assert not routes.begins(SOURCE, 90.0) and routes.begins(SOURCE, 91.0)
    now = 91.0
    for _ in range(40):
        routes.failed(SOURCE, now)
        now += MAX_RETRY_S
        assert routes.begins(SOURCE, now)
    routes.worked(SOURCE)
    routes.carried(SOURCE)
    routes.failed(SOURCE, now)
    assert routes.begins(SOURCE, now + 30.0)


def test_restarted_sources_are_forgotten_at_last() -> None:
    routes = RankRoutes(retry_s=30.0)
    for number in range(MAX_SOURCES + 1):
        assert routes.begins((SOURCE[0], Generation(number)), 0.0)
        routes.worked((SOURCE[0], Generation(number)))
    assert not routes.is_open((SOURCE[0], Generation(0)))
    assert routes.is_open((SOURCE[0], Generation(MAX_SOURCES)))

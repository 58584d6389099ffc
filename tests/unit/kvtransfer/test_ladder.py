"""The transport ladder, with tables and with a state machine of arbitrary events of connections and probes."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton_serve.kvtransfer.ladder import Ladder, LadderLimits, ProbeOutcome, Rung, Verdict
from baton_serve.kvtransfer.probing.plan import complete
from baton_serve.kvtransfer.settings import TransferSettings

MEMORY, USM, ZEROMQ = Rung("memory"), Rung("usm"), Rung("zeromq")
NCCL, STAGING = Rung("oneccl", "nccl"), Rung("oneccl", "nccl+staging")
LIMITS = LadderLimits(retry_s=10, max_retry_s=100, busy_retry_s=2, last_resort_s=1, gain=1.1)


def devices() -> Ladder:
    return Ladder([USM, ZEROMQ, NCCL, STAGING], unproved=["oneccl"], limits=LIMITS)


def hosts() -> Ladder:
    return Ladder([MEMORY, USM, ZEROMQ], limits=LIMITS)


def proved(rung: Rung, speed: float) -> Verdict:
    return Verdict(rung, "proved", speed)


def failed(rung: Rung, outcome: ProbeOutcome = "crashed") -> Verdict:
    return Verdict(rung, outcome, reason="so it went")


def test_on_hosts_the_order_is_a_rule_and_nothing_is_due() -> None:
    ladder = hosts()
    assert ladder.order(0) == [MEMORY, USM, ZEROMQ]
    ladder.missing(MEMORY, "not in this process", 0)
    ladder.attached(USM, 0)
    assert ladder.due(1e9) == []
    assert ladder.choice() == "rule"
    assert ladder.why() == ["memory: not in this process", "usm: in use"]


def test_what_needs_a_proof_is_due_at_once_and_not_used_before() -> None:
    ladder = devices()
    assert ladder.order(0) == [USM, ZEROMQ]
    assert set(ladder.due(0)) == {NCCL, STAGING}
    ladder.attached(USM, 0)
    assert ladder.due(0) == [USM, NCCL, STAGING]
    assert ladder.choice() == "rule"
    assert ladder.why() == ["usm: in use", "oneccl: by nccl, not proved yet", "oneccl: by nccl+staging, not proved yet"]


@pytest.mark.parametrize(
    ("verdicts", "move", "order"),
    [
        ([proved(USM, 50e9), proved(NCCL, 300e9), proved(STAGING, 200e9)], NCCL, [NCCL, USM, ZEROMQ, STAGING]),
        ([proved(USM, 50e9), failed(NCCL), proved(STAGING, 200e9)], STAGING, [STAGING, USM, ZEROMQ]),
        ([proved(USM, 50e9), proved(NCCL, 52e9), failed(STAGING)], None, [USM, ZEROMQ, NCCL]),
        ([proved(USM, 50e9), failed(NCCL, "wrong bytes"), failed(STAGING, "skipped")], None, [USM, ZEROMQ]),
        ([failed(USM, "deadline"), proved(NCCL, 10e9), failed(STAGING)], NCCL, [NCCL, USM, ZEROMQ]),
        ([failed(USM, "unavailable"), failed(NCCL, "skipped"), failed(STAGING, "skipped")], None, [USM, ZEROMQ]),
        ([proved(Rung("pigeon"), 1e12)], None, [USM, ZEROMQ]),
    ],
)
def test_the_fastest_that_proved_itself_is_taken(
    verdicts: Sequence[Verdict], move: Rung | None, order: list[Rung]
) -> None:
    ladder = devices()
    ladder.attached(USM, 0)
    assert ladder.probed(verdicts, 5) == move
    assert ladder.order(5) == order


def test_a_move_and_a_demotion_are_reported_with_their_reasons() -> None:
    ladder = devices()
    ladder.attached(USM, 0)
    assert ladder.probed([proved(USM, 50e9), proved(NCCL, 300e9), failed(STAGING)], 1) == NCCL
    ladder.attached(NCCL, 2)
    assert (ladder.choice(), ladder.speed()) == ("proved", 300e9)
    assert ladder.why() == [
        "usm: not the fastest, 50.0 GB/s in a probe",
        "oneccl: in use by nccl, 300.0 GB/s in a probe",
        "oneccl: by nccl+staging, probe: crashed, so it went",
    ]
    ladder.demoted(NCCL, "nothing moved for 10 s", 3)
    assert (ladder.choice(), ladder.speed()) == ("none", 0)
    assert ladder.order(3) == [USM, ZEROMQ]
    ladder.attached(USM, 3)
    assert ladder.choice() == "rule"
    assert "oneccl: by nccl, demoted, nothing moved for 10 s" in ladder.why()


def test_what_was_demoted_is_due_after_intervals_that_grow_to_a_limit() -> None:
    ladder, now = Ladder([USM, ZEROMQ], limits=LIMITS), 0.0
    ladder.attached(USM, now)
    for interval in (10, 20, 40, 80, 100, 100):
        ladder.demoted(USM, "damage", now)
        ladder.attached(ZEROMQ, now)
        assert ladder.choice() == "fallback"
        assert ladder.due(now + interval - 0.1) == []
        now += interval
        assert ladder.due(now) == [ZEROMQ, USM]
        assert ladder.probed([proved(ZEROMQ, 3e9), proved(USM, 20e9)], now) == USM
        ladder.attached(USM, now)
        assert ladder.due(now) == []
    now += LIMITS.max_retry_s + 1
    ladder.demoted(USM, "damage after long service", now)
    assert ladder.due(now + 10) == [USM]


def test_a_failed_probe_is_tried_again_later_each_time() -> None:
    ladder, now = devices(), 0.0
    ladder.attached(USM, now)
    for interval in (10, 20, 40):
        assert NCCL in ladder.due(now)
        ladder.probed([proved(USM, 1e9), failed(NCCL), failed(STAGING)], now)
        assert ladder.due(now + interval - 0.1) == []
        now += interval


def test_without_an_answer_a_probe_is_only_put_off() -> None:
    ladder = devices()
    ladder.attached(USM, 0)
    ladder.postponed(0)
    assert ladder.due(1.9) == []
    assert ladder.due(2.0) == [USM, NCCL, STAGING]


def test_where_nothing_is_left_the_demoted_are_tried_again_after_a_rest() -> None:
    ladder = devices()
    for rung in (USM, ZEROMQ):
        ladder.attached(rung, 0)
        ladder.demoted(rung, "damage", 0)
    assert ladder.order(0.5) == []
    assert ladder.order(1.0) == [USM, ZEROMQ]
    ladder.attached(USM, 1.0)
    assert ladder.why()[0] == "usm: in use"


@pytest.mark.parametrize(
    ("changes", "is_device", "names", "unproved", "forced"),
    [
        ({}, False, ("memory", "usm", "zeromq"), ("oneccl",), {}),
        ({}, True, ("memory", "usm", "zeromq", "oneccl"), ("oneccl",), {}),
        ({"peer_access": "0"}, True, ("memory", "usm", "zeromq"), ("oneccl",), {}),
        (
            {"peer_access": "1"},
            True,
            ("memory", "oneccl", "usm", "zeromq"),
            (),
            {"oneccl": "CCL_TOPO_P2P_ACCESS=1"},
        ),
        ({"peer_access": "1"}, False, ("memory", "usm", "zeromq"), (), {"oneccl": "CCL_TOPO_P2P_ACCESS=1"}),
        ({"transports": ("oneccl",)}, True, ("oneccl",), (), {"oneccl": "--kv-transport oneccl"}),
        (
            {"transports": ("oneccl",), "peer_access": "0"},
            True,
            ("oneccl",),
            (),
            {"oneccl": "--kv-transport oneccl"},
        ),
        ({"transports": ("zeromq", "usm")}, False, ("zeromq", "usm"), (), {}),
    ],
)
def test_what_the_operator_says_decides_what_is_tried(
    changes: dict[str, object],
    is_device: bool,
    names: tuple[str, ...],
    unproved: tuple[str, ...],
    forced: dict[str, str],
) -> None:
    made = TransferSettings(**changes)  # type: ignore[arg-type]
    assert made.ladder(is_device=is_device) == names
    assert (made.unproved(), made.forced()) == (unproved, forced)


def test_a_forced_transport_is_used_unproved_and_says_what_forced_it() -> None:
    ladder = Ladder([NCCL, USM], forced={"oneccl": "CCL_TOPO_P2P_ACCESS=1"}, limits=LIMITS)
    assert ladder.due(0) == []
    ladder.attached(ladder.order(0)[0], 0)
    assert ladder.choice() == "forced"
    assert ladder.why() == ["oneccl: in use by nccl, forced by CCL_TOPO_P2P_ACCESS=1"]


def test_each_rung_of_a_probe_gets_a_verdict() -> None:
    reported = [proved(USM, 1e9)]
    made = complete([USM, NCCL, STAGING], reported, "crashed", "signal 11")
    assert made == [reported[0], Verdict(NCCL, "crashed", reason="signal 11"), Verdict(STAGING, "skipped")]


class Fate(RuleBasedStateMachine):
    """A connection that follows the ladder's advice, over transports that fail when they like."""

    def __init__(self) -> None:
        super().__init__()
        self.ladder, self.now = devices(), 0.0
        self.has_proof: set[Rung] = {USM, ZEROMQ}
        self.demoted_at: dict[Rung, float] = {}

    @rule(seconds=st.sampled_from([0.1, 0.9, 1.0, 2.5, 10.0, 200.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(miss=st.integers(0, 3))
    def connect(self, miss: int) -> None:
        for position, rung in enumerate(self.ladder.order(self.now)):
            assert rung in self.has_proof
            if position >= miss:
                self.ladder.attached(rung, self.now)
                return
            self.ladder.missing(rung, "not to be had", self.now)

    @precondition(lambda self: self.ladder.current is not None)
    @rule()
    def demote(self) -> None:
        rung = self.ladder.current
        assert rung is not None
        self.ladder.demoted(rung, "damage", self.now)
        if rung in (NCCL, STAGING):
            self.has_proof.discard(rung)
        assert self.ladder.current is None

    @precondition(lambda self: self.ladder.due(self.now))
    @rule(data=st.data())
    def probe(self, data: st.DataObject) -> None:
        made: list[ProbeOutcome] = ["proved", "proved", "wrong bytes", "deadline", "crashed", "skipped"]
        outcomes = st.sampled_from(made)
        rungs = self.ladder.due(self.now)
        verdicts = [Verdict(r, data.draw(outcomes), data.draw(st.sampled_from([1e9, 2e9, 9e9]))) for r in rungs]
        self.has_proof |= {verdict.rung for verdict in verdicts if verdict.outcome == "proved"}
        speeds = {verdict.rung: verdict.bytes_per_second for verdict in verdicts if verdict.outcome == "proved"}
        before = self.ladder.current
        move = self.ladder.probed(verdicts, self.now)
        assert self.ladder.current == before
        if move is not None:
            assert speeds[move] == max(speeds.values())
            assert self.ladder.order(self.now)[0] == move
            self.ladder.attached(move, self.now)
        elif before is not None and before in speeds:
            assert max(speeds.values()) <= LIMITS.gain * speeds[before]
        assert not [rung for rung in self.ladder.due(self.now) if rung in speeds and rung != self.ladder.current]

    @rule()
    def busy(self) -> None:
        self.ladder.postponed(self.now)
        assert not self.ladder.due(self.now)

    @invariant()
    def nothing_is_lost(self) -> None:
        """After any events, there is a usable transport again in time, and every barred transport is retried."""
        usable = self.ladder.order(self.now + LIMITS.last_resort_s + 0.001)
        assert usable
        assert {*usable, *self.ladder.due(self.now + LIMITS.max_retry_s)} == {USM, ZEROMQ, NCCL, STAGING}


Fate.TestCase.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
TestFate = Fate.TestCase

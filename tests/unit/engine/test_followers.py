"""When a prompt that is read behind another instance begins, and with what."""

import pytest

from contracts.identity import RequestId
from engine.followers import Followers
from engine.front import FrontLostError, Gate
from engine.reservations import Reservations
from engine.scheduler import Scheduler
from engine.sequence import State
from tests.unit.engine.gates import Gates
from tests.unit.engine.work import add, make_roster, make_work, step

A, LEAD = RequestId("a"), RequestId("p0")


class Setting:
    def __init__(self) -> None:
        self.roster = make_roster(16, batched=8)
        self.scheduler = Scheduler(self.roster)
        self.gates = Gates()
        self.reservations = Reservations(self.roster)
        self.followers = Followers(self.roster, self.reservations, self.gates)
        add(self.roster, make_work("p0", [1] * 8, max_tokens=1), "prefill")
        work = make_work("a", [1] * 20, max_tokens=1)
        self.reservation = self.reservations.reserve(work, 0.0, "prefill", LEAD)

    @property
    def state(self) -> State:
        return self.roster.requests[A].sequences[0].state

    def step(self) -> None:
        step(self.roster, self.scheduler)
        list(self.followers.share(0.0))


def test_it_begins_with_the_step_after_the_one_that_computes_what_it_awaits() -> None:
    setting, gate = Setting(), Gate(4)
    assert not setting.followers.follow(A, 16, gate, 0.0)
    assert not setting.gates.gates
    setting.step()
    assert setting.state is State.RUNNING
    assert setting.gates.gates == {A: gate}
    assert setting.followers.follow(A, 16, gate, 0.0), "it does already"
    setting.followers.forget(A)
    assert not setting.gates.gates


def test_behind_a_front_that_is_done_it_waits_for_nothing() -> None:
    setting, gate = Setting(), Gate(4)
    gate.reached(1, 1)
    setting.step()
    assert setting.followers.follow(A, 16, gate, 0.0)
    assert not setting.gates.gates


def test_one_that_waits_for_its_lead_can_be_forgotten() -> None:
    setting = Setting()
    assert not setting.followers.follow(A, 16, Gate(4), 0.0)
    setting.roster.cancel(A, None)
    setting.followers.forget(A)
    setting.step()
    assert not setting.gates.gates


def test_one_whose_gate_is_lost_reads_alone_with_the_next_step() -> None:
    setting, gate = Setting(), Gate(4)
    assert setting.reservation is not None
    assert not setting.followers.follow(A, 16, gate, 0.0)
    setting.step()
    setting.reservations.mark_received(A, setting.reservation.names[2:3])
    gate.lost("it died")
    setting.followers.drop_lost(0.0)
    assert not setting.gates.gates
    assert [(chunk.start, chunk.length) for chunk in setting.scheduler.schedule(0.0).chunks] == [(12, 8)]


def test_one_whose_step_was_launched_goes_on() -> None:
    """Another request may have computed what it awaited, after its lead had ended without."""
    setting, gate = Setting(), Gate(4)
    assert not setting.followers.follow(A, 16, gate, 0.0)
    setting.step()
    gate.reached(1, 1)
    plan = setting.scheduler.schedule(0.0)
    setting.gates.forget(A)
    setting.scheduler.advance(plan)
    assert setting.followers.read_alone(A, 0.0)
    assert setting.roster.requests[A].sequences[0].num_computed == 20


def test_a_gate_of_which_nobody_tells_is_lost_in_time() -> None:
    gate = Gate(2, patience_s=0.0)
    gate.reached(1, 2)
    gate.wait(0)
    with pytest.raises(FrontLostError, match="in time"):
        gate.wait(1)
    assert gate.is_lost

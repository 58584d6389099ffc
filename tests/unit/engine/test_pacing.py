"""Steps leave those who write their promised time: the scheduler with an engine's learned pace."""

import pytest

from baton_serve.engine.core.request_table import Roster
from baton_serve.engine.core.scheduler import Plan, Scheduler
from baton_serve.engine.core.step_time_model import Pace
from tests.unit.engine.test_pace import promise_of_step
from tests.unit.engine.work import AheadSteps, add, made_up_token, make_roster, make_work, step

STEP_S = 0.006
ALLOWS_64, ALLOWS_128 = promise_of_step(STEP_S + 0.0017), promise_of_step(STEP_S + 0.0033)
"""Promises; 40 tokens of prompts take 1 ms."""


def pace(*, stretch: float = 1e9) -> Pace:
    return Pace(40_000.0, STEP_S, stretch)


def writing(*promises_s: float | None, paced: Pace | None = None) -> tuple[Roster, Scheduler]:
    """Sequences that write, with these promises, and a prompt of 200 tokens that waits."""
    roster = make_roster(num_blocks=200, seqs=8, batched=256)
    scheduler = Scheduler(roster, paced)
    for number, promise_s in enumerate(promises_s):
        add(roster, make_work(f"w{number}", [1, 2, 3], max_tokens=100, itl_s=promise_s))
    step(roster, scheduler)
    assert all(sequence.num_generated == 1 for sequence in roster.running)
    add(roster, make_work("long", [5] * 200, max_tokens=2))
    return roster, scheduler


def prompt_tokens(plan: Plan) -> int:
    return sum(chunk.length for chunk in plan.chunks if chunk.length > 1)


def test_a_prompt_goes_in_chunks_that_the_tightest_promise_allows() -> None:
    for promises, tokens in (((ALLOWS_128,), 127), ((ALLOWS_128, ALLOWS_64, ALLOWS_128), 61)):
        roster, scheduler = writing(*promises, paced=pace())
        plan = scheduler.schedule(0.0)
        assert (prompt_tokens(plan), len(plan.chunks)) == (tokens, len(promises) + 1)
        roster.check_invariants()


def test_nothing_promised_is_a_whole_step_unless_a_stretch_is_set() -> None:
    assert prompt_tokens(writing(None, paced=pace())[1].schedule(0.0)) == 200
    assert prompt_tokens(writing(None)[1].schedule(0.0)) == 200
    assert prompt_tokens(writing(None, paced=pace(stretch=1.3))[1].schedule(0.0)) == 64 - 1


def test_where_nobody_writes_a_promise_bounds_nothing() -> None:
    roster = make_roster(num_blocks=200, batched=256)
    add(roster, make_work("a", [1] * 200, itl_s=ALLOWS_64))
    assert prompt_tokens(Scheduler(roster, pace()).schedule(0.0)) == 200


def test_a_promise_that_cannot_be_kept_still_lets_prompts_advance() -> None:
    roster, scheduler = writing(0.001, paced=pace())
    assert prompt_tokens(scheduler.schedule(0.0)) == 31
    for _ in range(-(-200 // 31) - 1):
        step(roster, scheduler)
    assert [output.request_id for output in step(roster, scheduler).tokens] == ["w0", "long"]


@pytest.mark.parametrize("is_ahead", [False, True])
def test_every_step_is_bounded_and_the_tokens_are_the_same(is_ahead: bool) -> None:
    roster, scheduler = writing(ALLOWS_64, ALLOWS_128, paced=pace())
    planned: list[int] = []
    schedule = scheduler.schedule

    def seen(now: float) -> Plan:
        plan = schedule(now)
        planned.append(prompt_tokens(plan))
        return plan

    scheduler.schedule = seen  # type: ignore[method-assign]
    ahead, tokens = AheadSteps(), dict[str, list[int]]()
    for _ in range(200):
        if not scheduler.has_work() and ahead.launched is None:
            break
        result = ahead.step(roster, scheduler) if is_ahead else step(roster, scheduler)
        for output in result.tokens:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert [count for count in planned if count] == [62, 62, 62, 14]
    assert tokens["long"] == [made_up_token("long", 0, position) for position in range(2)]
    assert len(tokens["w0"]) == len(tokens["w1"]) == 99


def test_what_an_instance_has_to_spare_for_prompts() -> None:
    """64 tokens in a step, two of them of those who write."""
    roster, scheduler = writing(ALLOWS_64, ALLOWS_128, paced=pace())
    assert scheduler.spare_tokens_per_s() == pytest.approx(62 / (STEP_S + 62 / 40_000))
    assert writing(ALLOWS_64, None, paced=pace())[1].spare_tokens_per_s() == 0.0, "nothing was promised to one"
    assert writing(0.001, paced=pace())[1].spare_tokens_per_s() == 0.0, "no time is left"
    assert Scheduler(make_roster(), pace()).spare_tokens_per_s() == 40_000.0, "nobody writes"
    assert roster.num_preemptions == 0

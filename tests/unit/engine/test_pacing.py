"""Steps meet the ITL SLOs of decoding sequences: the scheduler with the step times learned by an engine."""

import pytest

from baton_serve.engine.core.request_table import RequestTable
from baton_serve.engine.core.scheduler import ScheduledBatch, Scheduler
from baton_serve.engine.core.step_time_model import StepTimeModel
from tests.unit.engine.test_step_time_model import slo_of_step
from tests.unit.engine.work import AheadSteps, add, made_up_token, make_table, make_work, step

STEP_S = 0.006
ALLOWS_64, ALLOWS_128 = slo_of_step(STEP_S + 0.0017), slo_of_step(STEP_S + 0.0033)
"""ITL SLOs that allow 64 and 128 tokens in a step; 40 prompt tokens take 1 ms."""


def step_time_model(*, max_stretch: float = 1e9) -> StepTimeModel:
    return StepTimeModel(40_000.0, STEP_S, max_stretch)


def writing(*itl_slos_s: float | None, paced: StepTimeModel | None = None) -> tuple[RequestTable, Scheduler]:
    """Return a table with decoding sequences that have these ITL SLOs, and a waiting prompt of 200 tokens."""
    table = make_table(num_blocks=200, seqs=8, batched=256)
    scheduler = Scheduler(table, paced)
    for number, itl_slo_s in enumerate(itl_slos_s):
        add(table, make_work(f"w{number}", [1, 2, 3], max_tokens=100, itl_s=itl_slo_s))
    step(table, scheduler)
    assert all(sequence.num_generated == 1 for sequence in table.running)
    add(table, make_work("long", [5] * 200, max_tokens=2))
    return table, scheduler


def prompt_tokens(plan: ScheduledBatch) -> int:
    return sum(chunk.length for chunk in plan.chunks if chunk.length > 1)


def test_a_prompt_is_computed_in_chunks_that_the_tightest_slo_allows() -> None:
    for slos_s, tokens in (((ALLOWS_128,), 127), ((ALLOWS_128, ALLOWS_64, ALLOWS_128), 61)):
        table, scheduler = writing(*slos_s, paced=step_time_model())
        plan = scheduler.schedule(0.0)
        assert (prompt_tokens(plan), len(plan.chunks)) == (tokens, len(slos_s) + 1)
        table.check_invariants()


def test_without_an_slo_a_prompt_gets_a_whole_step_unless_a_stretch_is_set() -> None:
    assert prompt_tokens(writing(None, paced=step_time_model())[1].schedule(0.0)) == 200
    assert prompt_tokens(writing(None)[1].schedule(0.0)) == 200
    assert prompt_tokens(writing(None, paced=step_time_model(max_stretch=1.3))[1].schedule(0.0)) == 64 - 1


def test_without_decoding_sequences_steps_are_not_bounded() -> None:
    table = make_table(num_blocks=200, batched=256)
    add(table, make_work("a", [1] * 200, itl_s=ALLOWS_64))
    assert prompt_tokens(Scheduler(table, step_time_model()).schedule(0.0)) == 200


def test_an_slo_that_cannot_be_met_still_lets_prompts_advance() -> None:
    table, scheduler = writing(0.001, paced=step_time_model())
    assert prompt_tokens(scheduler.schedule(0.0)) == 31
    for _ in range(-(-200 // 31) - 1):
        step(table, scheduler)
    assert [output.request_id for output in step(table, scheduler).tokens] == ["w0", "long"]


@pytest.mark.parametrize("is_ahead", [False, True])
def test_every_step_is_bounded_and_the_tokens_are_the_same(is_ahead: bool) -> None:
    table, scheduler = writing(ALLOWS_64, ALLOWS_128, paced=step_time_model())
    planned: list[int] = []
    schedule = scheduler.schedule

    def seen(now: float) -> ScheduledBatch:
        plan = schedule(now)
        planned.append(prompt_tokens(plan))
        return plan

    scheduler.schedule = seen  # type: ignore[method-assign]
    ahead, tokens = AheadSteps(), dict[str, list[int]]()
    for _ in range(200):
        if not scheduler.has_work() and ahead.launched is None:
            break
        result = ahead.step(table, scheduler) if is_ahead else step(table, scheduler)
        for output in result.tokens:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert [count for count in planned if count] == [62, 62, 62, 14]
    assert tokens["long"] == [made_up_token("long", 0, position) for position in range(2)]
    assert len(tokens["w0"]) == len(tokens["w1"]) == 99


def test_what_an_instance_has_to_spare_for_prompts() -> None:
    """A step has 64 tokens, two of them of decoding sequences."""
    table, scheduler = writing(ALLOWS_64, ALLOWS_128, paced=step_time_model())
    assert scheduler.spare_tokens_per_s() == pytest.approx(62 / (STEP_S + 62 / 40_000))
    assert writing(ALLOWS_64, None, paced=step_time_model())[1].spare_tokens_per_s() == 0.0, (
        "one sequence has no ITL SLO"
    )
    assert writing(0.001, paced=step_time_model())[1].spare_tokens_per_s() == 0.0, "no time is left"
    assert Scheduler(make_table(), step_time_model()).spare_tokens_per_s() == 40_000.0, "nobody writes"
    assert table.num_preemptions == 0

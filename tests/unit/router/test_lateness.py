"""Two readers who take longer than predicted are expected to, and are asked only where they still gain."""

from typing import Any

import pytest
from msgspec.structs import replace

from services.router.joint import predicted_s, times_predicted
from services.router.lateness import FEW, FORGOTTEN_S, MOST, RECENT, Lateness
from tests.unit.router.conftest import Router, Serve
from tests.unit.router.test_joint import LONG, P0, P1, pair, placed

POOLS: dict[str, Any] = {"prefill": 2, "decode": 1, "joint_prefill_min_tokens": 20}


def test_a_few_prompts_say_how_late_the_next_will_be() -> None:
    lateness = Lateness()
    for number in range(FEW - 1):
        lateness.observe(1.4, float(number))
        assert lateness.value(float(number)) == 1.0
    lateness.observe(2.0, 9.0)
    assert lateness.value(9.0) == 1.4


def test_one_that_waited_for_something_else_says_nothing() -> None:
    lateness = Lateness()
    for times in (1.1, 1.1, 9.0, 1.1, 1.1):
        lateness.observe(times, 0.0)
    assert lateness.value(0.0) == 1.1


def test_it_is_neither_believed_to_be_early_nor_endlessly_late() -> None:
    early, late = Lateness(), Lateness()
    for _ in range(FEW):
        early.observe(0.5, 0.0)
        late.observe(50.0, 0.0)
    assert (early.value(0.0), late.value(0.0)) == (1.0, MOST)


def test_what_was_long_ago_is_forgotten_and_tried_again() -> None:
    lateness = Lateness()
    for _ in range(RECENT):
        lateness.observe(2.0, 0.0)
    assert lateness.value(FORGOTTEN_S - 1) == 2.0
    assert lateness.value(FORGOTTEN_S) == 1.0


def test_a_back_that_is_late_makes_the_prediction_longer_but_not_the_queue() -> None:
    warm = replace(P0, cached_tokens=4000, queued_tokens=500)
    plain, late = placed(warm, P1), placed(warm, replace(P1, behind=1.2))
    assert plain.part_ends == late.part_ends
    assert late.predicted_ttft_s - 0.5 == pytest.approx(1.2 * (plain.predicted_ttft_s - 0.5))
    took_s = late.predicted_ttft_s
    times = times_predicted(warm, P1, num_tokens=LONG.num_tokens, ends=late.part_ends, took_s=took_s)
    assert times == pytest.approx(1.2)
    assert predicted_s(warm, P1, num_tokens=LONG.num_tokens, ends=late.part_ends) == plain.predicted_ttft_s


def test_where_they_would_gain_nothing_one_reads_alone() -> None:
    assert pair(P0, replace(P1, behind=1.5)) == ("p0", "p1")
    assert pair(P0, replace(P1, behind=2.0)) == ("", "p0")


def test_instances_that_were_late_are_left_to_read_alone(serve: Serve) -> None:
    """Here each says that it took 0.75 s, for prompts that take milliseconds."""

    async def scenario(router: Router) -> None:
        fronts = []
        for number in range(FEW + 1):
            prompt = [100 + number + i % 5 for i in range(42)]
            body = {"seed": 0, "prompt": prompt, "max_tokens": 2}
            answer = await router.http.post("/v1/completions", json=body, headers={"x-baton-explain": "1"})
            fronts.append(answer.json()["baton"].get("front"))
        assert None not in fronts[:FEW]
        assert fronts[FEW] is None

    serve(scenario, **POOLS)

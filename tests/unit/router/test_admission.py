"""Requests that are admitted, wait or are refused: decisions alone, and as a client sees them."""

import asyncio
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from baton_serve.contracts.identity import InstanceId
from baton_serve.contracts.instance import Load
from baton_serve.services.router.placement.admission import AdmissionRules, QueueState, Refusal, admission_verdict
from baton_serve.services.router.placement.decode_times import StepTimeFit
from baton_serve.services.router.placement.fair_queue import FairQueue
from baton_serve.services.router.placement.policy import Candidate, Placement
from baton_serve.services.router.protocol.caller import NO_SLO, Caller, Slo
from tests.unit.router.conftest import Router, Serve, settle
from tests.unit.router.fakes import LAYOUT

RULES = AdmissionRules(max_queued_tokens=1000, dispatch_ahead_s=1.0)
IDLE = QueueState(queued_tokens=0, before_s=0.0, tokens_per_s=100.0)


def placement(*, queued: float = 0.0, step_s: float = 0.02, doubt: float = 1.0) -> Placement:
    one = Candidate(
        instance=InstanceId("p"),
        role="unified",
        layout=LAYOUT,
        free_blocks=10,
        total_blocks=10,
        active_sequences=0,
        queued_tokens=queued,
        prefill_tokens_per_s=100.0,
        next_step_s=step_s,
        rate_uncertainty=doubt,
        step_uncertainty=doubt,
    )
    ttft_s = one.time_to_first_token_s(50)
    return Placement(decision="unified", decode=one, predicted_ttft_s=ttft_s, shortest_queue_s=one.queue_s)


def test_an_instance_with_little_work_gets_more_and_one_with_much_does_not() -> None:
    assert admission_verdict(placement(queued=90), NO_SLO, RULES, waited_s=0, tokens=50, waiting=IDLE) == "go"
    assert admission_verdict(placement(queued=110), NO_SLO, RULES, waited_s=0, tokens=50, waiting=IDLE) == "wait"


def test_a_long_queue_where_the_prefix_is_cached_holds_nobody_up_while_another_instance_is_free() -> None:
    hot = replace(placement(queued=500), shortest_queue_s=0.2)
    assert admission_verdict(hot, NO_SLO, RULES, waited_s=0, tokens=50, waiting=IDLE) == "go"


def test_new_requests_do_not_overtake_waiting_ones() -> None:
    waiting = QueueState(queued_tokens=200, before_s=2.0, tokens_per_s=100.0)
    assert admission_verdict(placement(), NO_SLO, RULES, waited_s=0, tokens=50, waiting=waiting) == "wait"


def test_a_full_queue_refuses_with_the_time_it_takes_to_make_room() -> None:
    waiting = QueueState(queued_tokens=980, before_s=9.8, tokens_per_s=100.0)
    verdict = admission_verdict(placement(queued=500), NO_SLO, RULES, waited_s=0, tokens=50, waiting=waiting)
    assert isinstance(verdict, Refusal) and verdict.cause == "queue"
    assert verdict.retry_after_s == pytest.approx(0.3)


def test_a_first_token_that_would_come_late_is_refused_at_once() -> None:
    waiting = QueueState(queued_tokens=100, before_s=1.0, tokens_per_s=100.0)
    taken = admission_verdict(placement(queued=50), Slo(ttft_s=2.2), RULES, waited_s=0.1, tokens=50, waiting=waiting)
    assert taken == "wait"
    verdict = admission_verdict(placement(queued=50), Slo(ttft_s=1.5), RULES, waited_s=0.1, tokens=50, waiting=waiting)
    assert isinstance(verdict, Refusal) and verdict.cause == "ttft"
    assert verdict.retry_after_s == pytest.approx(0.6)


def test_tokens_that_would_come_slowly_are_refused() -> None:
    verdict = admission_verdict(placement(step_s=0.05), Slo(itl_s=0.04), RULES, waited_s=0, tokens=50, waiting=IDLE)
    assert isinstance(verdict, Refusal) and verdict.cause == "itl"


@pytest.mark.parametrize("slo", [Slo(itl_s=0.02), Slo(ttft_s=0.2)])
def test_an_instance_that_was_slow_long_ago_gets_another_chance(slo: Slo) -> None:
    """A rate measured while other processes were busy would refuse all requests with an SLO forever, unless a request
    without one came. So an old measurement counts less and less."""
    for doubt, is_taken in ((1.0, False), (2.0, False), (4.0, True)):
        verdict = admission_verdict(
            placement(step_s=0.05, doubt=doubt), slo, RULES, waited_s=0, tokens=50, waiting=IDLE
        )
        assert (verdict == "go") == is_taken


def test_the_time_of_a_step_is_learned_from_reports() -> None:
    steps = StepTimeFit()
    assert steps.predict(3) == 0.0
    steps.observe(0, 0.02)
    assert steps.predict(10) == pytest.approx(0.02), "a warm-up says nothing of a slope"
    for running in (1, 5, 9, 13) * 30:
        steps.observe(running, 0.02 + 0.001 * running)
    assert steps.predict(20) == pytest.approx(0.04, rel=0.1)


def drained(queue: FairQueue[str]) -> list[str]:
    order = []
    while (item := queue.first()) is not None:
        queue.remove(item)
        queue.check_invariants()
        order.append(item)
    return order


def test_a_caller_with_many_requests_delays_its_own_alone() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(4):
        queue.push(f"a{i}", Caller(name="a"), priority=0, tokens=100)
    queue.push("b0", Caller(name="b"), priority=0, tokens=100)
    queue.push("b1", Caller(name="b"), priority=0, tokens=100)
    assert drained(queue) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_a_weight_of_two_gets_twice_the_share() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(6):
        queue.push(f"a{i}", Caller(name="a", weight=2.0), priority=0, tokens=100)
    for i in range(3):
        queue.push(f"b{i}", Caller(name="b"), priority=0, tokens=100)
    first = drained(queue)[:6]
    assert sum(name.startswith("a") for name in first) == 4


def test_a_smaller_priority_goes_first_and_who_leaves_is_forgotten() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("late", Caller(name="a"), priority=5, tokens=10)
    queue.push("soon", Caller(name="a"), priority=-1, tokens=10)
    queue.push("gone", Caller(name="b"), priority=-2, tokens=10)
    assert queue.tokens_before(Caller(name="c"), priority=0) == 20
    assert queue.remove("gone") and not queue.remove("gone")
    assert drained(queue) == ["soon", "late"] and queue.tokens == 0


async def ask(router: Router, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    body = {"prompt": list(range(97, 117)), "max_tokens": 3, "seed": 0, **body}
    return await router.http.post("/v1/completions", json=body, headers=headers)


def slow(router: Router, *, queued_tokens: int = 0, step_s: float = 0.0) -> None:
    """Its instances say that they read 10 tokens a second."""
    for instance in router.fakes.instances.values():
        instance.report(
            Load(
                free_blocks=100,
                total_blocks=100,
                prefill_tokens_per_s=10.0,
                queued_tokens=queued_tokens,
                decode_step_s=step_s,
                running=1,
            )
        )


def test_what_cannot_be_in_time_is_refused_with_a_time(serve: Serve) -> None:
    async def test(router: Router) -> None:
        slow(router)
        assert (await ask(router, {"x-baton-ttft-ms": "2500"})).status_code == 200
        refused = await ask(router, {"x-baton-ttft-ms": "500"}, prompt=list(range(65, 85)))
        assert refused.status_code == 429, "20 tokens take 2 s"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert 1 <= int(refused.headers["retry-after"]) <= 2
        slow(router, step_s=0.08)
        assert (await ask(router, {"x-baton-itl-ms": "50"})).status_code == 429
        assert (await ask(router, {"x-baton-itl-ms": "200"})).status_code == 200
        for wrong in ("soon", "-1", "nan", "0"):
            answer = await ask(router, {"x-baton-ttft-ms": wrong})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "x-baton-ttft-ms"

    serve(test)


def test_a_model_may_have_its_own_slo(serve: Serve) -> None:
    async def test(router: Router) -> None:
        slow(router)
        assert (await ask(router)).status_code == 429
        assert (await ask(router, {"x-baton-ttft-ms": "60000"})).status_code == 200

    serve(test, default_ttft_ms=500.0)


def test_the_itl_slo_is_sent_with_the_work(serve: Serve) -> None:
    async def test(router: Router) -> None:
        await ask(router, {"x-baton-itl-ms": "200"})
        await ask(router)
        reported = [[m.work.itl_s for m in router.fakes[name].assignments()] for name in ("prefill-0", "decode-0")]
        assert reported == [[0.2, 0.5]] * 2

    serve(test, default_itl_ms=500.0)


def test_a_decode_instance_with_time_to_spare_reads_what_would_wait(serve: Serve) -> None:
    async def test(router: Router) -> None:
        slow(router)
        router.fakes["decode-0"].report(
            Load(free_blocks=100, total_blocks=100, prefill_tokens_per_s=10.0, spare_tokens_per_s=40.0, running=1)
        )
        answer = await ask(router, {"x-baton-itl-ms": "200", "x-baton-explain": "1"})
        reported = answer.json()["baton"]
        assert (reported["decision"], reported["decode"]) == ("decode_only", "decode-0")
        assert reported["predicted_ttft_s"] < 1.0 < reported["other_ttft_s"], "20 tokens at 40 and at 10 a second"
        answer = await ask(router, {"x-baton-explain": "1"}, prompt=list(range(65, 85)))
        assert answer.json()["baton"]["decision"] == "disaggregated"

    serve(test)


def test_waiting_requests_are_placed_by_priority_when_instances_have_less_to_do(serve: Serve) -> None:
    async def test(router: Router) -> None:
        slow(router)
        router.fakes["prefill-0"].hold = 0
        first = asyncio.create_task(ask(router))
        await settle()
        others = [asyncio.create_task(ask(router, priority=p)) for p in (7, 3, 5)]
        await settle()
        assert len(router.fakes["prefill-0"].jobs) == 1 and router.dispatcher.num_waiting == 3
        router.fakes["prefill-0"].resume()
        answers = await asyncio.gather(first, *others)
        assert [a.status_code for a in answers] == [200] * 4
        order = [m.work.priority for m in router.fakes["prefill-0"].assignments()]
        assert order == [0, 3, 5, 7]
        assert router.dispatcher.num_waiting == 0

    serve(test)


def test_a_client_that_leaves_the_queue_is_forgotten(serve: Serve) -> None:
    async def test(router: Router) -> None:
        slow(router)
        router.fakes["prefill-0"].hold = 0
        first = asyncio.create_task(ask(router))
        await settle()
        second = asyncio.create_task(ask(router))
        await settle()
        assert router.dispatcher.num_waiting == 1
        second.cancel()
        await settle()
        assert router.dispatcher.num_waiting == 0
        router.fakes["prefill-0"].resume()
        assert (await first).status_code == 200

    serve(test)


def test_the_queue_is_bounded_in_tokens(serve: Serve) -> None:
    async def test(router: Router) -> None:
        slow(router)
        router.fakes["prefill-0"].hold = 0
        tasks = [asyncio.create_task(ask(router)) for _ in range(3)]
        await settle()
        refused = await ask(router)
        assert (
            refused.status_code == 429 and "40 of at most 45 prompt tokens wait" in refused.json()["error"]["message"]
        )
        router.fakes["prefill-0"].resume()
        assert [a.status_code for a in await asyncio.gather(*tasks)] == [200] * 3

    serve(test, max_queued_tokens=45)

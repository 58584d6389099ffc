"""Two instances read a prompt: what each is told, what is told of it, and that nothing is left of it in any case."""

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from contracts.identity import RequestId
from contracts.messages import Batch, Cancel, Failed, Prefill, PrefillReport, Tokens
from contracts.sampling import SamplingParams
from services.common.logs import JsonFormatter
from services.router.circuit import FAILURES
from services.router.cluster import Cluster
from services.router.dispatch import Dispatcher
from services.router.flight import Flight
from services.router.front import FrontPart
from services.router.job import Arrival, Job
from services.router.main import admission_of, flight_rules
from services.router.member import Member
from services.router.metrics import RouterMetrics
from services.router.outbox import Outbox
from services.router.settings import RouterSettings
from tests.unit.router.conftest import Router, Serve, settle
from tests.unit.router.fakes import FakeCluster, FakeInstance, handoff_report, prefill_report, record

PROMPT = [104 + i % 5 for i in range(42)]
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 6}
POOLS: dict[str, Any] = {"prefill": 2, "decode": 1, "joint_prefill_min_tokens": 20}


def reads(instance: FakeInstance) -> list[Prefill]:
    return [message for message in instance.received if isinstance(message, Prefill)]


async def explained(router: Router, **body: Any) -> dict[str, Any]:
    answer = await router.http.post(
        "/v1/completions", json={"seed": 0, **BODY, **body}, headers={"x-baton-explain": "1"}
    )
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_each_gets_its_part(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        await router.complete(**BODY, temperature=0.7, logprobs=1, stop=["#"], n=2)
        (ahead,), (behind,) = reads(router.fakes["prefill-0"]), reads(router.fakes["prefill-1"])
        assert ahead.work.request_id == behind.work.request_id + "^"
        assert (ahead.work.token_ids, ahead.work.num_prompt_tokens) == (PROMPT[:16], 16)
        assert ahead.work.sampling == SamplingParams(seed=0, max_tokens=1, temperature=0.0)
        assert (ahead.work.sequences, behind.work.sequences) == ([0], [0, 1])
        assert ahead.work.root == behind.work.root
        assert ahead.front is None and ahead.ticket is not None and behind.front is not None
        assert behind.front.ticket == ahead.ticket and behind.front.num_blocks == 4
        assert (ahead.ticket.source, ahead.ticket.sink) == ("prefill-0", "prefill-1")
        assert behind.ticket is not None and behind.ticket.sink == "decode-0"
        assert behind.work.token_ids == PROMPT and behind.work.sampling.logprobs == 1
        assert not router.fakes["prefill-0"].cancels()

    serve(scenario, **POOLS)


def test_it_is_off_by_default(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        await router.complete(**BODY)
        (alone,) = reads(router.fakes["prefill-0"])
        assert alone.front is None and not reads(router.fakes["prefill-1"])

    serve(scenario, prefill=2)


def test_answers_metrics_and_the_log_tell_of_it(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def scenario(router: Router) -> None:
        told = (await explained(router))["baton"]
        assert (told["front"], told["prefill"], told["front_tokens"]) == ("prefill-0", "prefill-1", 16)
        assert told["cached_tokens"] == {"device": 4}
        await explained(router, prompt=[9] * 10)
        text = (await router.http.get("/metrics")).text
        assert 'baton:joint_prefill_requests_total{model_name="tiny"} 1.0' in text
        assert 'baton:prefix_hit_tokens_total{model_name="tiny",tier="device"} 8.0' in text

    serve(scenario, **POOLS)
    lines = [json.loads(JsonFormatter().format(line)) for line in caplog.records if line.message == "request ended"]
    first, second = lines
    assert (first["front"], first["front_tokens"]) == ("prefill-0", 16)
    assert (second["front"], second["front_tokens"]) == (None, None)


def test_what_the_front_found_cached_is_what_was_not_computed(serve: Serve) -> None:
    """The back's own report does not know of it."""

    async def scenario(router: Router) -> None:
        ahead, behind = router.fakes["prefill-0"], router.fakes["prefill-1"]
        ahead.hold = behind.hold = 0
        task = asyncio.create_task(explained(router))
        await settle()
        (message,) = reads(ahead)
        request_id = message.work.request_id
        ahead.jobs.clear()
        ahead.send(
            PrefillReport(request_id=request_id, queue_s=0, prefill_s=0, cached_tokens={"device": 12}, pulled_tokens=8)
        )
        ahead.send(Tokens(request_id=request_id, sequence=0, position=0, token_ids=[7], finish_reason="length"))
        assert message.ticket is not None
        router.fakes.prefilled.add(message.ticket.ticket)
        behind.resume()
        told = (await task)["baton"]
        assert told["cached_tokens"] == {"device": 12}
        assert told["pulled_tokens"] == 8

    serve(scenario, **POOLS)


def test_work_of_both_counts_at_once_and_until_each_has_read_its_part(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        ahead, behind = (router.cluster.member(record.instance) for record in router.fakes.records()[1:])
        assert ahead is not None and behind is not None
        for name in ("prefill-0", "prefill-1"):
            router.fakes[name].hold = 0
        task = asyncio.create_task(router.complete(**BODY))
        await settle()
        assert (ahead.own_tokens, behind.own_tokens) == (16, 26)
        assert (ahead.unreported_blocks, behind.unreported_blocks) == (4, 11)
        router.fakes["prefill-0"].resume()
        await settle()
        assert (ahead.own_tokens, behind.own_tokens) == (0, 26)
        assert ahead.shares == {}
        router.fakes["prefill-1"].resume()
        await task

    serve(scenario, **POOLS)


def test_both_parts_are_expected_to_be_cached(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        await router.complete(**BODY)
        await router.complete(**BODY)
        # All full blocks are taken to be at the one that was behind.
        assert [len(reads(router.fakes[f"prefill-{i}"])) for i in range(2)] == [1, 2]
        assert reads(router.fakes["prefill-1"])[-1].front is None

    serve(scenario, **POOLS)


@pytest.mark.parametrize("code", ["internal", "handoff_failed", "overloaded", "draining", "invalid"])
def test_a_front_that_fails_costs_no_request(serve: Serve, code: Any) -> None:
    async def scenario(router: Router) -> None:
        router.fakes["prefill-0"].refuses = code
        told = (await explained(router))["baton"]
        assert (told["front"], told.get("front_tokens", 0), told.get("replays", 0)) == ("prefill-0", 0, 0)
        member = router.cluster.member(router.fakes["prefill-0"].record.instance)
        assert member is not None
        assert member.circuit.failures == (code in ("internal", "handoff_failed"))

    serve(scenario, **POOLS)


def test_a_front_that_fails_again_and_again_gets_no_more_work(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes["prefill-0"].refuses = "internal"
        for number in range(8):
            await router.complete(**BODY | {"prompt": [10 * number + i for i in range(42)]})
        assert len(reads(router.fakes["prefill-0"])) == 5

    serve(scenario, **POOLS)


def test_a_lost_front_costs_no_request(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        ahead, behind = router.fakes["prefill-0"], router.fakes["prefill-1"]
        ahead.hold = behind.hold = 0
        task = asyncio.create_task(explained(router))
        await settle()
        ahead.die()
        await settle()
        behind.resume()
        told = (await task)["baton"]
        assert told.get("front_tokens", 0) == told.get("replays", 0) == 0
        assert len(reads(behind)) == 1

    serve(scenario, **POOLS)


def test_a_front_that_is_too_late_is_told_to_stop(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        ahead = router.fakes["prefill-0"]
        ahead.hold = 0
        await router.complete(**BODY)
        (job,) = reads(ahead)
        assert [cancel.request_id for cancel in ahead.cancels()] == [job.work.request_id]

    serve(scenario, **POOLS)


def test_a_lost_back_is_replayed_and_its_front_told(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        expected = (await router.complete(prompt=PROMPT[::-1], max_tokens=6))["choices"]
        ahead, behind = router.fakes["prefill-0"], router.fakes["prefill-1"]
        ahead.hold = behind.hold = 0
        task = asyncio.create_task(explained(router))
        await settle()
        first = reads(ahead)[-1].work.request_id
        behind.die()
        ahead.resume()
        answer = await task
        assert answer["baton"]["replays"] == 1
        assert first in [cancel.request_id for cancel in ahead.cancels()]
        assert len(answer["choices"]) == len(expected)

    serve(scenario, **POOLS)


def test_prompt_logprobs_are_computed_by_one(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        await router.complete(**BODY, prompt_logprobs=1)
        assert not reads(router.fakes["prefill-1"])

    serve(scenario, **POOLS)


def test_a_front_on_trial_that_was_not_needed_may_be_tried_again() -> None:
    member = Member(record("f", "prefill"))
    for _ in range(FAILURES):
        member.circuit.failed(0.0)
    member.circuit.tries(2.0)
    assert not member.circuit.allows(2.0)
    FrontPart(owner=None, request_id=RequestId("r^"), member=member).end(cancel=False)  # type: ignore[arg-type]
    assert member.circuit.allows(2.0)


class Scene:
    """A request that two instances read, all of them silent but for what a test lets them say."""

    def __init__(self) -> None:
        self.fakes = FakeCluster()
        for name, role in (("f", "prefill"), ("p", "prefill"), ("x", "decode")):
            self.fakes.add(record(name, role)).hold = 0  # type: ignore[arg-type]
        self.front, self.back, self.decode = (self.fakes[name] for name in "fpx")

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        settings = RouterSettings(model="m", disaggregation_min_tokens=0, joint_prefill_min_tokens=20)
        self.cluster = Cluster(self.fakes, self.fakes, clock=loop.time)
        await self.cluster.start()
        await settle(4)
        dispatcher = Dispatcher(
            self.cluster,
            rules=flight_rules(settings),
            admission=admission_of(settings),
            metrics=RouterMetrics(CollectorRegistry(), "tiny"),
            clock=loop.time,
        )
        now = loop.time()
        job = Job(request_id="r", token_ids=PROMPT, sampling=SamplingParams(seed=0, max_tokens=3))
        arrival = Arrival(at=now, tokenizing_at=now, tokenized_at=now)
        self.flight: Flight = dispatcher.launch([job], Outbox(), arrival=arrival)[0]
        self.first = self.back.assignments()[0].work
        self.part = self.front.assignments()[0].work

    def token(self, instance: FakeInstance, position: int, *, part: bool = False, ends: bool = False) -> None:
        request_id = self.part.request_id if part else self.first.request_id
        reason: Any = "length" if ends else None
        if ends:
            instance.jobs.pop(request_id, None)
        message = Tokens(request_id=request_id, sequence=0, position=position, token_ids=[9], finish_reason=reason)
        instance.send(Batch([message]))

    def fails(self, instance: FakeInstance) -> None:
        request_id = self.part.request_id if instance is self.front else self.first.request_id
        instance.jobs.pop(request_id, None)
        instance.send(Failed(request_id=request_id, code="internal", message="by the test"))


def front_reads(scene: Scene) -> None:
    scene.front.send(prefill_report(scene.part))


def back_reads(scene: Scene) -> None:
    scene.back.send(prefill_report(scene.first, front_tokens=16))
    scene.token(scene.back, 0)
    scene.back.jobs.pop(scene.first.request_id, None)


def decode_writes(scene: Scene) -> None:
    scene.decode.send(handoff_report(scene.first))
    scene.token(scene.decode, 1)
    scene.token(scene.decode, 2, ends=True)


EVENTS: dict[str, Callable[[Scene], None]] = {
    "front reads": front_reads,
    "front ends": lambda scene: scene.token(scene.front, 0, part=True, ends=True),
    "front fails": lambda scene: scene.fails(scene.front),
    "front is lost": lambda scene: scene.front.die(),
    "back reads": back_reads,
    "back fails": lambda scene: scene.fails(scene.back),
    "back is lost": lambda scene: scene.back.die(),
    "decode writes": decode_writes,
    "client leaves": lambda scene: scene.flight.cancel("the client left"),
}
OF_THE_FRONT = {"front reads", "front ends", "front fails", "front is lost"}


@pytest.mark.parametrize("first", EVENTS)
def test_nothing_is_left_in_any_order_of_events(first: str) -> None:
    """Of four events, as far as each can still happen; then the client leaves."""

    async def play(order: tuple[str, ...]) -> None:
        scene = Scene()
        await scene.start()
        for event in order:
            EVENTS[event](scene)
            await settle(3)
            for member in scene.cluster.members():
                member.check_invariants()
        if set(order) <= OF_THE_FRONT:
            assert scene.flight.timeline.replays == 0 and not scene.flight.is_over, order
        scene.flight.cancel("over")
        await settle(3)
        for member in scene.cluster.members():
            assert member.shares == {}, order
            assert (member.own_tokens, member.own_sequences, member.unreported_blocks) == (0, 0, 0), order
        if not {"front ends", "front fails", "front is lost"} & set(order):
            assert Cancel(scene.part.request_id) in scene.front.cancels(), order
        assert scene.fakes.busy() == [], order
        await scene.cluster.close()

    async def scenario() -> None:
        others = [event for event in EVENTS if event != first]
        for rest in itertools.permutations(others, 3):
            await play((first, *rest))

    asyncio.run(scenario())

"""Two instances read a prompt by turns: what each is told, what is told of it, and that nothing is left of it."""

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from contracts.identity import RequestId
from contracts.messages import Batch, Cancel, Failed, Prefill, PrefillReport, Tokens, Work
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
from tests.unit.router.fakes import FakeCluster, FakeFlight, FakeInstance, handoff_report, prefill_report, record

PROMPT = [104 + i % 5 for i in range(42)]
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 6}
POOLS: dict[str, Any] = {"prefill": 2, "decode": 1, "joint_prefill_min_tokens": 20}


def reads(instance: FakeInstance) -> list[Prefill]:
    return [message for message in instance.received if isinstance(message, Prefill)]


ENDS = (8, 20, 32)
"""Of the parts but the last: two turns, in steps of 16 tokens."""


async def explained(router: Router, **body: Any) -> dict[str, Any]:
    answer = await router.http.post(
        "/v1/completions", json={"seed": 0, **BODY, **body}, headers={"x-baton-explain": "1"}
    )
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_each_gets_its_part(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        await router.complete(**BODY, temperature=0.7, logprobs=1, stop=["#"], n=2)
        (first, third), (second, last) = reads(router.fakes["prefill-0"]), reads(router.fakes["prefill-1"])
        chain, request_id = (first, second, third, last), last.work.request_id
        assert [part.work.request_id for part in chain] == [*(f"{request_id}^{i}" for i in range(3)), request_id]
        for part, known, end in zip(chain, (0, 0, ENDS[0]), ENDS, strict=False):
            assert (part.work.token_ids, part.work.num_prompt_tokens) == (PROMPT[known:end], end)
            assert (part.front.known_tokens if part.front is not None else 0) == known
            assert part.work.sampling == SamplingParams(seed=0, max_tokens=1, temperature=0.0)
            assert part.work.sequences == [0]
        assert len({part.work.root for part in chain}) == 1
        assert last.front is not None and last.front.known_tokens == 0
        assert last.work.token_ids == PROMPT and last.work.sampling.logprobs == 1 and last.work.sequences == [0, 1]
        sinks = [part.ticket.sink for part in chain if part.ticket is not None]
        assert sinks == ["prefill-1", "prefill-0", "prefill-1", "decode-0"]
        assert first.front is None
        for before, part, end, after in zip(chain, chain[1:], ENDS, (None, first, second), strict=False):
            assert part.front is not None and part.front.ticket == before.ticket
            assert part.front.num_blocks == end // 4
            assert part.front.after == (after.work.request_id if after is not None else None)
        assert not router.fakes["prefill-0"].cancels() and not router.fakes["prefill-1"].cancels()

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
        assert (told["front"], told["prefill"], told["parts"]) == ("prefill-0", "prefill-1", 4)
        assert told["front_tokens"] == 8 + 12
        assert told["cached_tokens"] == {"device": 4}
        await explained(router, prompt=[9] * 10)
        text = (await router.http.get("/metrics")).text
        assert 'baton:joint_prefill_requests_total{model_name="tiny"} 1.0' in text
        assert 'baton:joint_prefill_parts_total{model_name="tiny"} 4.0' in text
        assert 'baton:joint_ttft_prediction_error_seconds_count{model_name="tiny"} 1.0' in text
        assert 'baton:prefix_hit_tokens_total{model_name="tiny",tier="device"} 8.0' in text

    serve(scenario, **POOLS)
    lines = [json.loads(JsonFormatter().format(line)) for line in caplog.records if line.message == "request ended"]
    first, second = lines
    assert (first["front"], first["parts"], first["front_tokens"]) == ("prefill-0", 4, 20)
    assert (second["front"], second["parts"], second["front_tokens"]) == (None, None, None)


def test_what_the_front_found_cached_is_what_was_not_computed(serve: Serve) -> None:
    """The back's own report does not know of it."""

    async def scenario(router: Router) -> None:
        ahead, behind = router.fakes["prefill-0"], router.fakes["prefill-1"]
        ahead.hold = behind.hold = 0
        task = asyncio.create_task(explained(router))
        await settle()
        ahead.jobs.clear()
        for message, cached in zip(reads(ahead), (8, 6), strict=True):
            request_id = message.work.request_id
            ahead.send(
                PrefillReport(
                    request_id=request_id,
                    queue_s=0.25,
                    prefill_s=9,
                    cached_tokens={"device": cached},
                    pulled_tokens=cached // 2,
                )
            )
            ahead.send(Tokens(request_id=request_id, sequence=0, position=0, token_ids=[7], finish_reason="length"))
            assert message.ticket is not None
            router.fakes.prefilled.add(message.ticket.ticket)
        behind.resume()
        told = (await task)["baton"]
        assert told["cached_tokens"] == {"device": 8}
        assert told["pulled_tokens"] == 4
        # From the front's beginning on, not of the last part.
        assert told["queue_s"] == 0.25
        assert told["prefill_s"] == pytest.approx(max(0.0, told["ttft_s"] - told["admission_s"] - 0.25))

    serve(scenario, **POOLS)


def test_work_of_both_counts_at_once_and_until_each_has_read_its_part(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        ahead, behind = (router.cluster.member(record.instance) for record in router.fakes.records()[1:])
        assert ahead is not None and behind is not None
        for name in ("prefill-0", "prefill-1"):
            router.fakes[name].hold = 0
        task = asyncio.create_task(router.complete(**BODY))
        await settle()
        assert (ahead.own_tokens, behind.own_tokens) == (8 + 12, 12 + 10)
        assert (ahead.unreported_blocks, behind.unreported_blocks) == (8, 11)
        assert (ahead.own_sequences, behind.own_sequences) == (1, 1)
        first = reads(router.fakes["prefill-0"])[0]
        router.fakes["prefill-0"].send(prefill_report(first.work))
        assert (ahead.own_tokens, behind.own_tokens) == (12, 12 + 10)
        router.fakes["prefill-0"].resume()
        await settle()
        assert (ahead.own_tokens, behind.own_tokens) == (0, 12 + 10)
        assert ahead.shares == {}
        router.fakes["prefill-1"].resume()
        await task

    serve(scenario, **POOLS)


def test_what_each_will_have_is_expected_to_be_cached(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        await router.complete(**BODY)
        await router.complete(**BODY)
        # All full blocks are taken to be at the one that was behind.
        assert [len(reads(router.fakes[f"prefill-{i}"])) for i in range(2)] == [2, 3]
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
        # Of each request two parts, for which it is blamed once.
        assert len(reads(router.fakes["prefill-0"])) == 5 * 2

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
        assert len(reads(behind)) == 2

    serve(scenario, **POOLS)


def test_a_front_that_is_too_late_is_told_to_stop(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        ahead = router.fakes["prefill-0"]
        ahead.hold = 0
        await router.complete(**BODY)
        assert [cancel.request_id for cancel in ahead.cancels()] == [job.work.request_id for job in reads(ahead)]

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


@pytest.mark.parametrize(("handoff_s", "front_s"), [(120.0, 10.0), (5.0, 5.0)])
def test_readers_wait_for_each_other_for_less_time_than_decode_waits(
    serve: Serve, handoff_s: float, front_s: float
) -> None:
    async def scenario(router: Router) -> None:
        await router.complete(**BODY)
        (first, third), (second, last) = reads(router.fakes["prefill-0"]), reads(router.fakes["prefill-1"])
        for part in (first, second, third):
            assert part.ticket is not None and front_s <= part.ticket.timeout_s < front_s + 1.0
        assert last.ticket is not None and last.ticket.timeout_s == handoff_s

    serve(scenario, **POOLS, handoff_timeout_s=handoff_s)


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
    owner = FakeFlight()
    FrontPart(owner=owner, request_id=RequestId("r^0"), member=member, number=0).end(cancel=False)
    assert not owner.heard
    assert member.circuit.allows(2.0)


class Scene:
    """A request that two instances read in four parts, all silent but for what a test lets them say."""

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
        first, third = self.front.assignments()
        second, last = self.back.assignments()
        self.first = last.work
        self.parts = [(self.front, first.work), (self.back, second.work), (self.front, third.work)]

    def token(self, instance: FakeInstance, position: int, *, ends: bool = False, work: Work | None = None) -> None:
        request_id = (work or self.first).request_id
        reason: Any = "length" if ends else None
        if ends:
            instance.jobs.pop(request_id, None)
        message = Tokens(request_id=request_id, sequence=0, position=position, token_ids=[9], finish_reason=reason)
        instance.send(Batch([message]))

    def reads(self, number: int) -> None:
        instance, work = self.parts[number]
        instance.send(prefill_report(work))

    def ends(self, number: int) -> None:
        instance, work = self.parts[number]
        self.token(instance, 0, ends=True, work=work)

    def fails(self, number: int | None) -> None:
        """A part, or the request itself at its last one."""
        instance, work = self.parts[number] if number is not None else (self.back, self.first)
        request_id = work.request_id
        instance.jobs.pop(request_id, None)
        instance.send(Failed(request_id=request_id, code="internal", message="by the test"))


def back_reads(scene: Scene) -> None:
    scene.back.send(prefill_report(scene.first, front_tokens=16))
    scene.token(scene.back, 0)
    scene.back.jobs.pop(scene.first.request_id, None)


def decode_writes(scene: Scene) -> None:
    scene.decode.send(handoff_report(scene.first))
    scene.token(scene.decode, 1)
    scene.token(scene.decode, 2, ends=True)


@pytest.mark.parametrize("fate", ["ends", "fails", "is lost"])
def test_blocks_that_the_next_part_did_not_fetch_are_freed_when_the_prompt_is_read(fate: str) -> None:
    """Its instance refused it, or is gone: nobody else would end the earlier part's lease before its deadline."""

    async def scenario() -> None:
        scene = Scene()
        await scene.start()
        for number in (0, 1):
            scene.reads(number)
            scene.ends(number)
        if fate == "is lost":
            scene.front.die()
        elif fate == "fails":
            scene.fails(2)
        else:
            scene.ends(2)
        await settle(3)
        back_reads(scene)
        await settle(3)
        part = Cancel(scene.parts[1][1].request_id)
        assert (part in scene.back.cancels()) == (fate != "ends")
        scene.flight.cancel("over")
        await settle(3)
        await scene.cluster.close()

    asyncio.run(scenario())


EVENTS: dict[str, Callable[[Scene], None]] = {
    "part 0 is read": lambda scene: scene.reads(0),
    "part 0 ends": lambda scene: scene.ends(0),
    "part 0 fails": lambda scene: scene.fails(0),
    "part 1 is read": lambda scene: scene.reads(1),
    "part 1 ends": lambda scene: scene.ends(1),
    "part 1 fails": lambda scene: scene.fails(1),
    "part 2 ends": lambda scene: scene.ends(2),
    "front is lost": lambda scene: scene.front.die(),
    "back reads": back_reads,
    "back fails": lambda scene: scene.fails(None),
    "back is lost": lambda scene: scene.back.die(),
    "decode writes": decode_writes,
    "client leaves": lambda scene: scene.flight.cancel("the client left"),
}
HARMLESS = {event for event in EVENTS if event.startswith("part")} | {"front is lost"}


@pytest.mark.parametrize("first", EVENTS)
def test_nothing_is_left_in_any_order_of_events(first: str) -> None:
    """Of three events, as far as each can still happen; then the client leaves."""

    async def play(order: tuple[str, ...]) -> None:
        scene = Scene()
        await scene.start()
        for event in order:
            EVENTS[event](scene)
            await settle(3)
            for member in scene.cluster.members():
                member.check_invariants()
        if set(order) <= HARMLESS:
            assert scene.flight.timeline.replays == 0 and not scene.flight.is_over, order
        scene.flight.cancel("over")
        await settle(3)
        for member in scene.cluster.members():
            assert member.shares == {}, order
            assert (member.own_tokens, member.own_sequences, member.unreported_blocks) == (0, 0, 0), order
        for number, (instance, work) in enumerate(scene.parts):
            lost = "front is lost" if instance is scene.front else "back is lost"
            if not {f"part {number} ends", f"part {number} fails", lost} & set(order):
                assert Cancel(work.request_id) in instance.cancels(), order
        assert scene.fakes.busy() == [], order
        await scene.cluster.close()

    async def scenario() -> None:
        others = [event for event in EVENTS if event != first]
        for rest in itertools.permutations(others, 2):
            await play((first, *rest))

    asyncio.run(scenario())

"""First tokens that are held back: in order, no longer than they may be, and never for what will not come."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from baton_serve.bench.simulation.virtual_time import run_virtually
from baton_serve.contracts.identity import RequestId
from baton_serve.contracts.instance import Load
from baton_serve.contracts.messages import Tokens
from baton_serve.services.router.cluster.worker_state import WorkerState
from baton_serve.services.router.placement.decode_times import FIRST_GAP_ITL_RATIO, HELD_TTFT_RATIO
from baton_serve.services.router.placement.policy import PlacementPolicy
from baton_serve.services.router.protocol.caller import Slo
from baton_serve.services.router.protocol.errors import UnavailableError
from baton_serve.services.router.requests.attempt import Attempt
from baton_serve.services.router.requests.first_token_pacer import FirstTokenPacer
from baton_serve.services.router.requests.prompt_request import RequestPolicy, RequestTiming
from baton_serve.services.router.requests.timeline import Timeline
from baton_serve.services.router.requests.token_queue import TokenQueue
from baton_serve.services.router.text.token_sequence import TokenSequence
from tests.unit.router.conftest import Router, Serve, events_of, settle
from tests.unit.router.fakes import FakeLifecycle, record
from tests.unit.router.test_lifecycle import Asked

ITL_S, GAP_S = 0.010, 0.025
HOLD_S = GAP_S - FIRST_GAP_ITL_RATIO * ITL_S


class Bench:
    """A pacer as a request lifecycle owns it, at the time at which its first token comes from prefill."""

    def __init__(self, slo: Slo, *, max_itls: float = 3.0, position: int = 0, num_sequences: int = 1) -> None:
        self.loop = asyncio.get_running_loop()
        self.timeline = Timeline(arrived_at=self.loop.time())
        self.token_queue = TokenQueue()
        decode = WorkerState(record("d0", "decode"))
        for _ in range(20):
            decode.first_gap_quantile.observe(GAP_S)
        rules = RequestPolicy(
            policy=PlacementPolicy(),
            request_timeout_s=60.0,
            handoff_timeout_s=60.0,
            max_replays=1,
            instance_wait_s=0.0,
            expected_blocks_ttl_s=1.0,
            first_token_hold=max_itls,
        )
        now = self.loop.time()
        self.delivery = FirstTokenPacer(
            self.token_queue,
            self.timeline,
            RequestTiming(at=now, tokenizing_at=now, tokenized_at=now, slo=slo),
            rules,
            first_choice=0,
            clock=self.loop.time,
        )
        sequences = {i: TokenSequence(i) for i in range(num_sequences)}
        self.attempt = Attempt(
            owner=FakeLifecycle(),
            request_id=RequestId("r~0"),
            sequences=sequences,
            prefill=WorkerState(record("p0", "prefill")),
            decode=decode,
            position=position,
        )
        self.out: list[tuple[int, list[int], float]] = []
        self._reader = self.loop.create_task(self._read())

    def first(self, token: int, sequence: int = 0, finish_reason: Any = None) -> None:
        self._put(self.delivery.put_first_token, [self.attempt], token, 0, sequence, finish_reason)

    def later(self, token: int, position: int = 1, sequence: int = 0) -> None:
        self.attempt.on_second_token(sequence, self.loop.time())
        self._put(self.delivery.put, [], token, position, sequence, None)

    def _put(
        self, put: Callable[..., None], extra: list[Attempt], token: int, at: int, sequence: int, reason: Any
    ) -> None:
        tokens = Tokens(
            request_id=RequestId("r~0"), sequence=sequence, position=at, token_ids=[token], finish_reason=reason
        )
        one = self.attempt.sequences[sequence]
        put(*extra, one, one.accept(tokens), self.loop.time())

    async def _read(self) -> None:
        while True:
            for output in await self.token_queue.take():
                self.out.append((output.choice, list(output.tokens.token_ids), round(self.loop.time(), 6)))

    async def end(self) -> None:
        self._reader.cancel()
        await asyncio.wait([self._reader])


def virtually(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtually(scene)


def test_a_first_token_goes_out_when_the_second_is_near() -> None:
    async def scene() -> None:
        bench = Bench(Slo(itl_s=ITL_S))
        bench.first(7)
        await asyncio.sleep(GAP_S)
        bench.later(8)
        await asyncio.sleep(0.001)
        (_, first, first_token_at), (_, second, second_at) = bench.out
        assert (first, second) == ([7], [8])
        assert first_token_at == pytest.approx(HOLD_S)
        assert second_at - first_token_at == pytest.approx(FIRST_GAP_ITL_RATIO * ITL_S)
        assert bench.timeline.first_token_at == pytest.approx(HOLD_S)
        assert bench.timeline.held_s == pytest.approx(HOLD_S)
        await bench.end()

    virtually(scene)


def test_the_second_token_brings_the_first_with_it() -> None:
    async def scene() -> None:
        bench = Bench(Slo(itl_s=ITL_S), num_sequences=2)
        bench.first(7, sequence=0)
        bench.first(70, sequence=1)
        await asyncio.sleep(0.004)
        bench.later(8, sequence=0)
        await asyncio.sleep(1.0)
        assert bench.out == [
            (0, [7], 0.004),
            (0, [8], 0.004),
            (1, [70], pytest.approx(HOLD_S, abs=1e-6)),
        ]
        await bench.end()

    virtually(scene)


@pytest.mark.parametrize(
    ("slo", "max_itls", "position", "held_s"),
    [
        (Slo(), 3.0, 0, 0.0),
        (Slo(ttft_s=1.0), 3.0, 0, 0.0),
        (Slo(itl_s=0.050), 3.0, 0, 0.0),
        (Slo(itl_s=ITL_S), 0.0, 0, 0.0),
        (Slo(itl_s=ITL_S), 0.5, 0, 0.5 * ITL_S),
        (Slo(itl_s=ITL_S), 3.0, 5, 0.0),
        (Slo(ttft_s=0.010, itl_s=ITL_S), 3.0, 0, HELD_TTFT_RATIO * 0.010),
        (Slo(ttft_s=1.0, itl_s=ITL_S), 3.0, 0, HOLD_S),
    ],
    ids=["no itl slo", "ttft alone", "kept anyhow", "off", "bounded", "replayed", "ttft is near", "ttft is far"],
)
def test_how_long_a_first_token_is_held(slo: Slo, max_itls: float, position: int, held_s: float) -> None:
    async def scene() -> None:
        bench = Bench(slo, max_itls=max_itls, position=position)
        bench.first(7)
        await asyncio.sleep(1.0)
        [(_, _, at)] = bench.out
        assert at == pytest.approx(held_s, abs=1e-6)
        await bench.end()

    virtually(scene)


def test_the_last_token_is_never_held() -> None:
    async def scene() -> None:
        bench = Bench(Slo(itl_s=ITL_S))
        bench.first(7, finish_reason="length")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert bench.out == [(0, [7], 0.0)]
        await bench.end()

    virtually(scene)


def test_what_is_held_goes_out_before_an_error() -> None:
    async def scene() -> None:
        bench = Bench(Slo(itl_s=ITL_S))
        await bench.end()
        bench.first(7)
        bench.delivery.fail(UnavailableError("gone", code="instance_lost"))
        [output] = await bench.token_queue.take()
        assert output.tokens.token_ids == [7]
        with pytest.raises(UnavailableError):
            await bench.token_queue.take()

    virtually(scene)


def test_what_is_dropped_stays_away() -> None:
    async def scene() -> None:
        bench = Bench(Slo(itl_s=ITL_S))
        bench.first(7)
        bench.delivery.discard()
        await asyncio.sleep(1.0)
        assert bench.out == []
        await bench.end()

    virtually(scene)


def test_gaps_are_learned_as_they_came_held_or_not() -> None:
    async def scene() -> None:
        for slo in (Slo(), Slo(itl_s=ITL_S)):
            bench = Bench(slo)
            assert bench.attempt.decode is not None
            for number in range(64):
                bench.attempt.sequences[0] = TokenSequence(0)
                bench.first(number)
                await asyncio.sleep(0.040)
                bench.later(8)
            assert bench.attempt.decode.first_gap_s() == pytest.approx(0.040)
            assert bench.attempt.first_token_at == {}
            await bench.end()

    virtually(scene)


BODY: dict[str, Any] = {"prompt": "hello world", "max_tokens": 12, "seed": 0}
PROMISE = {"x-baton-itl-ms": "20000", "x-baton-explain": "1"}


def slow(router: Router) -> None:
    """Its decode instances take ten seconds a step: a first token is held until the second comes."""
    for name in ("decode-0", "decode-1"):
        if name in router.fakes.instances:
            load = Load(free_blocks=100, total_blocks=100, prefill_tokens_per_s=1000.0, decode_step_s=10.0)
            router.fakes[name].report(load)


class Held(Asked):
    """A request with an ITL SLO whose first token has arrived, while decode instances are blocked."""

    def __init__(self, router: Router, **body: Any) -> None:
        self._task = asyncio.create_task(self._ask(router, body))

    async def _ask(self, router: Router, body: dict[str, Any]) -> dict[str, Any]:
        answer = await router.http.post("/v1/completions", json=BODY | body, headers=PROMISE)
        assert answer.status_code == 200, answer.text
        if not body.get("stream"):
            return dict(answer.json())
        events = events_of(answer.text)
        texts = ["".join(c["text"] for e in events for c in e.get("choices", ()) if c["index"] == i) for i in range(3)]
        return {"choices": [{"text": text} for text in texts if text], "baton": events[-1].get("baton")}

    def cancel(self) -> None:
        self._task.cancel()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_an_answer_whose_first_token_was_held_is_the_same(serve: Serve, n: int, stream: bool) -> None:
    async def scenario(router: Router) -> None:
        expected = await Asked(router, **BODY, n=n).texts()
        slow(router)
        router.fakes["decode-0"].hold = 0
        asked = Held(router, n=n, stream=stream)
        await settle()
        (lifecycle,) = router.dispatcher._lifecycles
        assert [len(one.token_ids) for one in lifecycle.sequences] == [1] * n
        assert lifecycle.timeline.first_token_at is None
        router.fakes["decode-0"].resume()
        answer = await asked.answer()
        assert [choice["text"] for choice in answer["choices"]] == expected
        reported = answer["baton"]
        assert 0 < reported["held_s"] <= reported["ttft_s"]
        text = (await router.http.get("/metrics")).text
        assert 'baton:first_token_held_seconds_count{model_name="tiny"} 1.0' in text

    serve(scenario)


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_instances_that_die_while_a_first_token_is_held(serve: Serve, victim: str) -> None:
    async def scenario(router: Router) -> None:
        expected = await Asked(router, **BODY).texts()
        slow(router)
        for decode in ("decode-0", "decode-1"):
            router.fakes[decode].hold = 0
        asked = Held(router)
        await settle()
        (lifecycle,) = router.dispatcher._lifecycles
        at_work = victim if victim == "prefill-0" else next(d for d in ("decode-0", "decode-1") if router.fakes[d].jobs)
        router.fakes[at_work].die()
        await settle()
        assert lifecycle.timeline.first_token_at is not None, "nothing is waited for any more"
        for decode in ("decode-0", "decode-1"):
            if decode in router.fakes.instances:
                router.fakes[decode].resume()
        assert await asked.texts() == expected

    serve(scenario, prefill=2, decode=2)


def test_a_client_that_goes_while_its_first_token_is_held_leaves_nothing(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        slow(router)
        router.fakes["decode-0"].hold = 0
        asked = Held(router)
        await settle()
        (lifecycle,) = router.dispatcher._lifecycles
        lifecycle.cancel("the client disconnected")
        assert not lifecycle._pacer._held
        asked.cancel()
        await settle()

    serve(scenario)


def test_a_router_that_stops_sends_what_it_holds(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        slow(router)
        router.fakes["decode-0"].hold = 0
        asked = asyncio.create_task(router.http.post("/v1/completions", json=BODY | {"stream": True}, headers=PROMISE))
        await settle()
        router.dispatcher.close()
        events = events_of((await asked).text)
        assert events[0]["choices"][0]["text"]
        assert events[-1]["error"]["code"] == "stopping"

    serve(scenario)


def test_without_an_itl_slo_no_token_is_held(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        slow(router)
        router.fakes["decode-0"].hold = 0
        asked = Asked(router, **BODY)
        await settle()
        (lifecycle,) = router.dispatcher._lifecycles
        assert lifecycle.timeline.first_token_at is not None
        router.fakes["decode-0"].resume()
        await asked.answer()
        assert lifecycle.timeline.held_s == 0.0

    serve(scenario)

"""Streams that break and continue: no token is lost or repeated and nothing is left behind, for a failure of any
process at any time.
"""

import asyncio
import gc
import json
from typing import Any

import msgspec
import pytest

from baton_serve.contracts.identity import Generation
from baton_serve.contracts.instance import InstanceRecord, Load
from baton_serve.contracts.messages import Decode, Failed, Generate, Prefill, Tokens
from tests.unit.router.conftest import Router, Serve, events_of, settle
from tests.unit.router.fakes import LAYOUT, handoff_report, record

BODY: dict[str, Any] = {"prompt": "hello world", "max_tokens": 12}


class Asked:
    """A request that runs while the test does things to the cluster."""

    def __init__(self, router: Router, **body: Any) -> None:
        self._task = asyncio.create_task(router.complete(**body))

    async def texts(self) -> list[str]:
        return [choice["text"] for choice in (await self._task)["choices"]]

    async def answer(self) -> dict[str, Any]:
        return await self._task

    @property
    def is_done(self) -> bool:
        return self._task.done()


async def undisturbed(router: Router, **body: Any) -> list[str]:
    return await Asked(router, **body).texts()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("after", range(9))
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_a_lost_instance_is_not_noticed_by_the_client(serve: Serve, victim: str, after: int, n: int) -> None:
    async def scenario(router: Router) -> None:
        expected = await undisturbed(router, **BODY, n=n)
        instance = router.fakes[victim]
        instance.hold = after
        asked = Asked(router, **BODY, n=n)
        await settle()
        instance.die()
        assert await asked.texts() == expected

    serve(scenario, prefill=2, decode=2)


def test_logprobs_and_seeds_survive_a_replay(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        body = BODY | {"logprobs": 2, "seed": 11, "n": 2, "prompt_logprobs": 1}
        expected = await router.complete(**body)
        router.fakes["decode-0"].hold = 4
        asked = Asked(router, **body)
        await settle()
        router.fakes["decode-0"].die()
        answer = await asked.answer()
        assert answer["choices"] == expected["choices"]
        assert answer["usage"] == expected["usage"]
        replayed = [m.work for m in router.fakes["prefill-0"].assignments() if m.work.sequences != [0, 1]]
        assert [work.sequences for work in replayed] == [[0], [1]]
        for work in replayed:
            assert len(work.token_ids) > work.num_prompt_tokens
            assert work.sampling.prompt_logprobs is None

    serve(scenario, decode=2)


def test_prefill_is_not_needed_once_decode_has_the_blocks(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        expected = await undisturbed(router, **BODY)
        router.fakes["decode-0"].hold = 3
        asked = Asked(router, **BODY)
        await settle()
        decode = router.fakes["decode-0"]
        router.fakes["prefill-0"].die()
        await settle()
        decode.resume()
        assert await asked.texts() == expected
        assert len(decode.assignments()) == 2
        assert decode.cancels() == []

    serve(scenario)


def test_a_stream_that_broke_before_its_first_token_is_replayed_whole(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes["prefill-0"].hold = 0
        asked = Asked(router, **BODY, n=2)
        await settle()
        router.fakes["prefill-0"].die()
        await asked.texts()
        (work,) = [m.work for m in router.fakes["prefill-1"].assignments()]
        assert work.sequences == [0, 1]
        # The first attempt at the decode instance was called off.
        first, *_ = router.fakes["decode-0"].assignments()
        assert [c.request_id for c in router.fakes["decode-0"].cancels()] == [first.work.request_id]

    serve(scenario, prefill=2)


def test_a_lost_prefill_keeps_its_decode_where_blocks_have_arrived(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        expected = await undisturbed(router, **BODY)
        router.fakes["prefill-0"].hold = 0
        asked = Asked(router, **BODY)
        await settle()
        (chosen,) = [d for d in (router.fakes["decode-0"], router.fakes["decode-1"]) if d.jobs]
        # The other one would look better now.
        chosen.report(Load(free_blocks=50, total_blocks=100, prefill_tokens_per_s=1000.0, running=9))
        router.fakes["prefill-0"].die()
        assert await asked.texts() == expected
        assert chosen.assignments()[-1].work.request_id.endswith("~1")

    serve(scenario, prefill=2, decode=2)


def test_an_instance_that_drains_costs_no_replay(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        expected = await undisturbed(router, **BODY)
        for name in ("prefill-0", "prefill-1", "decode-0"):
            router.fakes[name].refuses = "draining"
        assert await Asked(router, **BODY).texts() == expected

    serve(scenario, prefill=3, decode=2, max_replays=0)


def test_without_another_prefill_decode_serves_alone(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        expected = await undisturbed(router, **BODY)
        router.fakes["prefill-0"].hold = 0
        asked = Asked(router, **BODY)
        await settle()
        router.fakes["prefill-0"].die()
        assert await asked.texts() == expected
        assert isinstance(router.fakes["decode-0"].assignments()[-1], Generate)

    serve(scenario)


def test_a_broken_stream_waits_for_an_instance_that_comes_back(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        expected = await undisturbed(router, **BODY)
        decode = router.fakes["decode-0"]
        decode.hold = 4
        asked = Asked(router, **BODY)
        await settle()
        decode.die()
        await settle()
        assert not asked.is_done
        router.fakes.add(restarted(decode.record))
        assert await asked.texts() == expected

    serve(scenario, instance_wait_s=5.0)


def test_a_stream_that_left_a_draining_instance_waits_for_another_one(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(router: Router) -> None:
        expected = await undisturbed(router, **BODY)
        # The usual case, long after the start of the router.
        monkeypatch.setattr(router.cluster, "expects_instances", lambda within_s: False)
        decode = router.fakes["decode-0"]
        decode.hold = 4
        asked = Asked(router, **BODY)
        await settle()
        (job,) = decode.jobs.values()
        decode.send(Failed(request_id=job.message.work.request_id, code="draining", message="the instance drains"))
        router.fakes.forget("decode-0")
        await settle()
        assert not asked.is_done
        router.fakes.add(restarted(decode.record))
        assert await asked.texts() == expected

    serve(scenario, instance_wait_s=5.0)


def test_a_broken_stream_is_given_up_after_a_while(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes["decode-0"].hold = 0
        post = asyncio.create_task(router.http.post("/v1/completions", json=BODY))
        streamed = asyncio.create_task(router.http.post("/v1/completions", json=BODY | {"stream": True}))
        await settle()
        router.fakes["decode-0"].die()
        assert (await post).status_code == 503
        # One that has begun to stream ends with the error as an event.
        events = events_of((await streamed).text)
        assert events[0]["choices"][0]["text"]
        assert events[-1]["error"]["code"] == "no_instance"

    serve(scenario)


def test_a_new_request_waits_for_an_instance_that_is_only_silent(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(router: Router) -> None:
        monkeypatch.setattr("baton_serve.services.router.cluster.cluster._RECONNECT_S", 0.02)
        for name in ("prefill-0", "decode-0"):
            link = router.fakes[name].link
            assert link is not None
            link.lose("no message for 3 s")
        # One turn of the loop: a timer of 20 ms may be over after more of them on a busy machine.
        await settle(1)
        assert router.cluster.expects_instances(within_s=0.0)
        assert len((await undisturbed(router, **BODY))[0]) == 12

    serve(scenario, instance_wait_s=5.0)


def test_a_new_request_waits_only_so_long_for_an_instance_that_left(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        for name in ("prefill-0", "decode-0"):
            router.fakes[name].die()
        await settle()
        asked = asyncio.create_task(router.http.post("/v1/completions", json=BODY))
        await settle()
        assert not asked.done()
        for name in ("prefill-0", "decode-0"):
            router.fakes.forget(name)
        assert (await asked).status_code == 503

    serve(scenario, instance_wait_s=0.5)


def test_requests_wait_for_the_first_instances_of_a_router_that_has_just_started(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        asked = asyncio.create_task(router.http.post("/v1/completions", json=BODY | {"seed": 0}))
        await settle()
        router.fakes.add(record("prefill-0", "prefill"))
        await settle()
        late = asyncio.create_task(router.http.post("/v1/completions", json=BODY | {"seed": 0}))
        await settle()
        assert not asked.done() and not late.done()
        router.fakes.add(record("decode-0", "decode"))
        assert (await asked).json()["choices"] == (await late).json()["choices"]
        assert (await asked).status_code == 200

    serve(scenario, prefill=0, decode=0, instance_wait_s=5.0)


def test_the_first_instances_are_awaited_only_so_long_and_by_so_many(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        first = asyncio.create_task(router.http.post("/v1/completions", json=BODY))
        await settle()
        assert (await router.http.post("/v1/completions", json=BODY)).status_code == 503
        assert not first.done()
        assert (await first).status_code == 503

    serve(scenario, prefill=0, decode=0, instance_wait_s=0.5, max_concurrent_requests=1)


def test_replays_are_bounded(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        for instance in router.fakes.instances.values():
            instance.refuses = "internal"
        answer = await router.http.post("/v1/completions", json=BODY)
        assert answer.status_code == 500
        attempts = sum(len(i.assignments()) for i in router.fakes.instances.values() if i.record.role == "decode")
        assert attempts == 3

    serve(scenario, prefill=2, decode=2, max_replays=2)


def test_an_instance_that_refuses_is_avoided(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        expected = await undisturbed(router, **BODY)
        router.fakes["decode-0"].refuses = "draining"
        router.fakes["prefill-0"].refuses = "handoff_failed"
        assert await undisturbed(router, **BODY) == expected
        assert len(router.fakes["decode-1"].assignments()) == 1

    serve(scenario, prefill=2, decode=2)


def test_a_failed_handoff_blames_whom_the_instance_names(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes["decode-0"].hold = 0
        asked = Asked(router, **BODY)
        await settle()
        decode = router.fakes["decode-0"]
        (assigned,) = decode.assignments()
        assert isinstance(assigned, Decode)
        decode.jobs.clear()
        lost = assigned.ticket.source
        decode.send(
            Failed(request_id=assigned.work.request_id, code="handoff_failed", message="peer is gone", lost=lost)
        )
        decode.resume()
        await asked.texts()
        assert len(decode.assignments()) == 2
        other = "prefill-1" if lost == "prefill-0" else "prefill-0"
        assert len(router.fakes[other].assignments()) == 1

    serve(scenario, prefill=2)


def test_tokens_that_come_twice_or_early_are_put_in_order(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        prefill, decode = router.fakes["prefill-0"], router.fakes["decode-0"]
        prefill.hold = decode.hold = 0
        asked = Asked(router, prompt="hello", max_tokens=6)
        await settle()
        (assigned,) = decode.assignments()
        request_id = assigned.work.request_id
        prefill.jobs.clear()
        decode.jobs.clear()

        def tokens(position: int, text: str, *, last: bool = False) -> Tokens:
            return Tokens(
                request_id=request_id,
                sequence=0,
                position=position,
                token_ids=list(text.encode()),
                finish_reason="length" if last else None,
            )

        decode.send(handoff_report(assigned.work))
        decode.send(tokens(3, "de"))
        decode.send(tokens(1, "bc"))
        prefill.send(tokens(0, "a"))
        decode.send(tokens(1, "bcd"))
        decode.send(tokens(0, "a"))
        decode.send(tokens(4, "ef", last=True))
        decode.send(tokens(6, "never"))
        assert await asked.texts() == ["abcdef"]

    serve(scenario)


def test_answers_of_a_called_off_attempt_reach_nobody(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        expected = await undisturbed(router, **BODY)
        decode = router.fakes["decode-0"]
        decode.hold = 2
        asked = Asked(router, **BODY)
        await settle()
        stale = decode.assignments()[-1].work.request_id
        prefill_request = router.fakes["prefill-0"].assignments()[-1]
        assert isinstance(prefill_request, Prefill)
        decode.send(Failed(request_id=stale, code="internal", message="broken"))
        decode.send(Tokens(request_id=stale, sequence=0, position=2, token_ids=[120]))
        decode.resume()
        assert await asked.texts() == expected

    serve(scenario)


def test_a_client_that_leaves_ends_the_work_on_both_sides(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        for stream in (True, False):
            router.fakes["decode-0"].hold = 2
            client = Client(router, BODY | {"stream": stream, "max_tokens": 100})
            await settle()
            assert router.fakes.busy()
            client.leave()
            await client.task
            await settle()
            router.check_idle()
            request_id = router.fakes["decode-0"].assignments()[-1].work.request_id
            for name in ("prefill-0", "decode-0"):
                assert router.fakes[name].cancels()[-1].request_id == request_id

    serve(scenario)


def test_a_request_that_takes_too_long_ends(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes["decode-0"].hold = 2
        answer = await router.http.post("/v1/completions", json=BODY)
        assert answer.status_code == 504
        assert router.fakes["decode-0"].cancels()
        assert router.fakes["decode-0"].assignments()[0].work.timeout_s <= 0.1
        assert answer.json()["error"]["code"] == "deadline_exceeded"

    serve(scenario, request_timeout_s=0.1)


def test_unified_instances_serve_alone(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        assert len((await undisturbed(router, **BODY))[0]) == 12
        assert isinstance(router.fakes["unified-0"].assignments()[0], Generate)

    serve(scenario, prefill=0, decode=0, unified=1)


def test_short_prompts_are_served_by_decode_alone(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        await undisturbed(router, prompt="hello", max_tokens=5)
        await undisturbed(router, prompt=[104] * 40, max_tokens=5)
        assert [type(m) for m in router.fakes["decode-0"].assignments()] == [Generate, Decode]

    serve(scenario, disaggregation_min_tokens=32)


def test_a_conversation_goes_on_where_its_blocks_are(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        prompt = list(range(100, 140))
        await undisturbed(router, prompt=prompt, max_tokens=5)
        chosen = next(n for n in ("prefill-0", "prefill-1") if router.fakes[n].assignments())
        for _ in range(3):
            prompt = [*prompt, *range(140, 160)]
            await undisturbed(router, prompt=prompt, max_tokens=5)
        assert len(router.fakes[chosen].assignments()) == 4

    serve(scenario, prefill=2)


def test_stopping_the_router_ends_its_requests(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes["decode-0"].hold = 0
        asked = asyncio.create_task(router.http.post("/v1/completions", json=BODY))
        await settle()
        router.dispatcher.close()
        assert (await asked).status_code == 503
        assert router.fakes["decode-0"].jobs == {}

    serve(scenario)


def restarted(record: InstanceRecord) -> InstanceRecord:
    return msgspec.structs.replace(record, generation=Generation(record.generation + 1))


def test_a_decode_instance_that_registers_and_vanishes_all_the_time_disturbs_no_answer_and_leaves_nothing(
    serve: Serve,
) -> None:
    async def scenario(router: Router) -> None:
        expected = await undisturbed(router, **BODY)
        cluster = router.cluster
        num_listeners = len(cluster._listeners)
        newest = record("decode-1", "decode")
        asked: list[Asked] = []
        num_assigned = 0
        for life in range(60):
            # Every third life begins under the record of the previous process, before its loss was noticed.
            flapping = router.fakes.add(newest)
            asked.append(Asked(router, **BODY))
            await settle(3 + life % 9)
            num_assigned += len(flapping.assignments())
            flapping.die()
            if life % 3:
                router.fakes.forget("decode-1")
            newest = restarted(newest)
        assert num_assigned > 10
        for one in asked:
            assert await one.texts() == expected
        if "decode-1" in router.fakes.registered:
            router.fakes.forget("decode-1")
        await settle(100)
        # The next look at the registry removes what had requests at the last one.
        router.fakes.on_change()
        await settle()
        assert [worker.record.instance for worker in cluster.workers()] == ["decode-0", "prefill-0"]
        assert len(cluster._listeners) == num_listeners
        assert cluster._tasks == set()
        assert len(cluster._layouts) == 1

    serve(scenario)


class Client:
    """Speaks ASGI itself, since the test client never disconnects."""

    def __init__(self, router: Router, body: dict[str, Any]) -> None:
        self._gone = asyncio.Event()
        self._body = json.dumps(body).encode()
        self._is_read = False
        self.sent: list[dict[str, Any]] = []
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        self.task = asyncio.create_task(router.app(scope, self._receive, self._send))

    def leave(self) -> None:
        self._gone.set()

    async def _receive(self) -> dict[str, Any]:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)


def test_an_ended_request_is_freed_without_the_garbage_collector(serve: Serve) -> None:
    """Reference cycles in every request would make the collector run often, which takes the router's CPU time."""

    async def scenario(router: Router) -> None:
        await undisturbed(router, **BODY)
        await settle()
        router.dispatcher.request_log.flush()
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            await undisturbed(router, **BODY)
            await settle()
            router.dispatcher.request_log.flush()
            gc.collect()
            in_cycles = {type(one).__name__ for one in gc.garbage if type(one).__module__.startswith("baton_serve.")}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert in_cycles == set()

    serve(scenario)


def test_the_worker_of_a_hybrid_is_told_where_its_prompt_parts_from_others(serve: Serve) -> None:
    layout = msgspec.structs.replace(LAYOUT, state_bytes=100)

    async def scenario(router: Router) -> None:
        for name in ("prefill-0", "prefill-1"):
            router.fakes.add(record(name, "prefill", layout=layout))
        router.fakes.add(record("decode-0", "decode", layout=layout))
        await settle()
        shared = list(range(10, 22))
        await router.complete(prompt=[*shared, *[5] * 9], max_tokens=2)
        await router.complete(prompt=[*shared, *[6] * 9], max_tokens=2)
        sent = [m for name in ("prefill-0", "prefill-1") for m in router.fakes[name].assignments()]
        assert sorted(m.work.branches for m in sent) == [[], [12]]
        assert [m.work.branches for m in router.fakes["decode-0"].assignments()] != []

    serve(scenario, prefill=0, decode=0)

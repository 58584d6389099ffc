"""After any failure of a request at any time, nothing stays counted for it, and other requests are served.

The n-th call of a port raises an exception (links, the tokenizer, the view of the cluster, the index, metrics, the
client's connection), or the request's task is cancelled at the n-th iteration of the loop.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton_serve.contracts.messages import Cancel, ToInstance
from baton_serve.contracts.pooling import PoolingProfile
from baton_serve.contracts.sampling import SamplingSpec
from baton_serve.services.router.cluster.worker_state import Sending, WorkerState
from baton_serve.services.router.placement.circuit_breaker import RetryBudget
from baton_serve.services.router.protocol.caller import Caller
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.requests.dispatcher import Dispatcher
from baton_serve.services.router.requests.lifecycle import RequestLifecycle
from baton_serve.services.router.requests.prompt_request import PromptRequest, RequestTiming
from baton_serve.services.router.requests.token_queue import TokenQueue
from tests.unit.router.conftest import Router, Serve, settle

EMBEDS = PoolingProfile(tasks=["embed", "token_embed"], dimensions=3)
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("/v1/completions", {"prompt": "hello world", "max_tokens": 6, "n": 2}),
    "streamed": ("/v1/completions", {"prompt": "hello world", "max_tokens": 6, "stream": True, "logprobs": 1}),
    "prompts": ("/v1/completions", {"prompt": ["hello", "world"], "max_tokens": 4}),
    "beams": ("/v1/completions", {"prompt": "hello", "max_tokens": 3, "n": 2, "use_beam_search": True}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}),
    "response": ("/v1/responses", {"input": "hello", "max_output_tokens": 4, "stream": True}),
}
INPUTS = {"input": ["hello", "world", "again"]}
ANYTHING = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Faults:
    """Wraps functions and raises `error` in the wrapped call number `at`."""

    def __init__(self, at: int, error: Exception) -> None:
        self.at = at
        self.error = error
        self.num_calls = 0
        self.is_on = True

    def count(self) -> None:
        self.num_calls += self.is_on
        if self.is_on and self.num_calls == self.at:
            raise self.error

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count()
            return call(*args, **kwargs)

        return counted

    def patch(self, monkeypatch: pytest.MonkeyPatch, owner: object, *names: str) -> None:
        for name in names:
            monkeypatch.setattr(owner, name, self.around(getattr(owner, name)))

    def prepare(self, prepare: Callable[[ToInstance], Sending], message: ToInstance) -> Sending:
        """Never fail a cancel: the instances would go on, and that would not be the router's fault."""
        if isinstance(message, Cancel):
            return prepare(message)
        self.count()
        return self.around(prepare(message))


def put_everywhere(router: Router, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in router.fakes.instances:
        link = router.fakes[name].link
        assert link is not None
        monkeypatch.setattr(link, "prepare", partial(faults.prepare, link.prepare))
    faults.patch(monkeypatch, router.service, "tokenize", "now", "timing", "limits")
    faults.patch(monkeypatch, router.cluster, "view", "routable_workers", "add_listener")
    faults.patch(monkeypatch, router.cluster.index, "expect", "match")
    faults.patch(monkeypatch, router.metrics, "started", "generated", "ended", "waiting", "refused", "pooled")
    faults.patch(monkeypatch, router.admission.ledger, "admit")
    faults.patch(monkeypatch, RetryBudget, "record_request", "take_retry")


def ask(router: Router, faults: Faults, path: str, body: dict[str, Any]) -> "asyncio.Task[None]":
    content = json.dumps({"seed": 0, **body}).encode()
    parts = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Any:
        faults.count()
        if parts:
            return parts.pop()
        await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        faults.count()
        await asyncio.sleep(0)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    app: Callable[..., Awaitable[None]] = router.app
    return asyncio.create_task(app(scope, receive, send))  # type: ignore[arg-type]


def counters(router: Router) -> dict[str, Any]:
    router.check_idle()
    turns, workers = router.pooling._pooling_admission, router.cluster.workers()
    return {
        "waiting": (router.dispatcher.num_waiting, turns.num_waiting),
        "going": turns.dispatched_tokens,
        "inputs": router.pooling._shares.total,
        "listeners": len(router.cluster._listeners),
        "tries": [worker.circuit_breaker._probe for worker in workers],
        "loads": [(m.own_tokens, m.own_sequences, m.unreported_blocks) for m in workers],
    }


class Trouble(NamedTuple):
    """The failure of one request. `steps` is the number of steps after which instances stop, so that no request ends
    by itself."""

    at: int
    error: Exception
    cancel_at: int | None
    dies: bool
    steps: int | None
    ahead_s: float


TROUBLE = st.builds(
    Trouble,
    at=st.integers(1, 60),
    error=st.sampled_from([RuntimeError("broken"), OverflowError("too big"), ConnectionError("gone")]),
    cancel_at=st.none() | st.integers(0, 40),
    dies=st.booleans(),
    steps=st.none() | st.integers(0, 3),
    ahead_s=st.sampled_from([0.0, 1.0]),
)


def hold(router: Router, steps: int | None) -> None:
    for fake in router.fakes.instances.values():
        fake.hold = steps


async def disturbed(router: Router, path: str, body: dict[str, Any], trouble: Trouble) -> None:
    """One request until its end, with all that happens to it: what is counted afterwards is what was before."""
    before, faults = counters(router), Faults(trouble.at, trouble.error)
    hold(router, trouble.steps)
    with pytest.MonkeyPatch.context() as monkeypatch:
        put_everywhere(router, faults, monkeypatch)
        task = ask(router, faults, path, body)
        for turn in range(60):
            if task.done():
                break
            if turn == trouble.cancel_at:
                task.cancel()
            if trouble.dies and turn == 6:
                router.fakes["prefill-0"].die()
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert task.done()
        if not task.cancelled():
            task.exception()
        faults.is_on = False
        await settle(40)
    after = counters(router)
    if trouble.dies:
        del before["loads"], after["loads"], before["tries"], after["tries"]
    assert after == before
    hold(router, None)


@ANYTHING
@given(kind=st.sampled_from(sorted(BODIES)), trouble=TROUBLE)
def test_an_answer_that_fails_anywhere_leaves_nothing_behind(serve: Serve, kind: str, trouble: Trouble) -> None:
    async def scenario(router: Router) -> None:
        await disturbed(router, *BODIES[kind], trouble)
        assert (await router.complete(prompt="hello", max_tokens=3))["usage"]["completion_tokens"] == 3

    serve(scenario, prefill=2, decode=2, dispatch_ahead_s=trouble.ahead_s)


@ANYTHING
@given(trouble=TROUBLE)
def test_vectors_that_fail_anywhere_leave_nothing_behind(serve: Serve, trouble: Trouble) -> None:
    async def scenario(router: Router) -> None:
        await disturbed(router, "/v1/embeddings", INPUTS, trouble)
        assert (await router.http.post("/v1/embeddings", json=INPUTS)).status_code == 200

    serve(scenario, prefill=2, decode=0, pooling=EMBEDS, dispatch_ahead_s=trouble.ahead_s)


@pytest.mark.parametrize("kind", [*BODIES, "vectors"])
def test_each_call_of_a_port_may_fail(serve: Serve, kind: str) -> None:
    """While instances hold, with one prompt running and the others waiting."""
    path, body = BODIES.get(kind, ("/v1/embeddings", INPUTS))
    pooling, decode = (EMBEDS, 0) if kind == "vectors" else (None, 1)
    for at in range(1, 60):
        trouble = Trouble(at, RuntimeError("broken"), cancel_at=None, dies=False, steps=1, ahead_s=0.0)
        serve(
            partial(disturbed, path=path, body=body, trouble=trouble),
            pooling=pooling,
            decode=decode,
            dispatch_ahead_s=0.0,
        )


def timing() -> RequestTiming:
    caller = Caller(name="limited", tokens_per_minute=1000)
    return RequestTiming(at=0.0, tokenizing_at=0.0, tokenized_at=0.0, caller=caller)


def test_what_cannot_be_encoded_is_refused_before_anything_is_counted_or_sent(serve: Serve) -> None:
    """This holds even for values that the schemas refuse, if they get past the schemas."""

    async def scenario(router: Router) -> None:
        before = counters(router)
        sampling = SamplingSpec(seed=0, max_tokens=4)
        for number, job in enumerate(
            [
                PromptRequest(request_id="a", token_ids=[97, 98], sampling=sampling, priority=10**30),
                PromptRequest(
                    request_id="b", token_ids=[97, 98], sampling=msgspec.structs.replace(sampling, top_k=10**30)
                ),
                PromptRequest(request_id="c", token_ids=[97, 10**30], sampling=sampling),
                PromptRequest(request_id="d\ud800", token_ids=[97, 98], sampling=sampling),
            ]
        ):
            good = PromptRequest(request_id=f"good-{number}", token_ids=[97], sampling=sampling)
            with pytest.raises(BadRequestError, match="cannot be"):
                router.dispatcher.submit([good, job], TokenQueue(), timing=timing())
            await settle()
            assert counters(router) == before
            assert all(used.tokens == 0 for used in router.admission.ledger.own(router.admission.wall_clock()))
            asked = [m for fake in router.fakes.instances.values() for m in fake.assignments()]
            assert [m for m in asked if not m.work.request_id.startswith("good")] == []

    serve(scenario)


def test_a_request_of_which_an_answer_cannot_be_handled_fails_alone(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers of many requests come in one frame."""

    async def scenario(router: Router) -> None:
        real = RequestLifecycle.on_tokens

        def broken(lifecycle: RequestLifecycle, *args: Any) -> None:
            if lifecycle.request.sampling.max_tokens == 7:
                raise RuntimeError("a bug")
            real(lifecycle, *args)

        monkeypatch.setattr(RequestLifecycle, "on_tokens", broken)
        fails = router.http.post("/v1/completions", json={"prompt": "world", "max_tokens": 7})
        answers = await asyncio.gather(fails, router.complete(prompt="hello you", max_tokens=4))
        assert answers[0].status_code == 500 and "a bug" not in answers[0].text
        assert answers[1]["usage"]["completion_tokens"] == 4
        assert "a bug" in caplog.text and "Traceback" in caplog.text

    serve(scenario)


def test_a_waiting_request_that_breaks_lets_those_behind_it_go(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is looked at by whichever request ends: its error must not be theirs."""

    async def scenario(router: Router) -> None:
        real = Dispatcher._admit_waiting

        def broken(dispatcher: Dispatcher, lifecycle: RequestLifecycle, *args: Any) -> bool:
            if len(lifecycle.request.token_ids) == 41:
                raise RuntimeError("a bug")
            return real(dispatcher, lifecycle, *args)

        monkeypatch.setattr(Dispatcher, "_admit_waiting", broken)
        router.fakes["prefill-0"].hold = 0
        first = asyncio.create_task(router.complete(prompt="x" * 200, max_tokens=2))
        await settle()
        broke = asyncio.create_task(router.http.post("/v1/completions", json={"prompt": "y" * 41, "max_tokens": 2}))
        await settle()
        last = asyncio.create_task(router.complete(prompt="z" * 40, max_tokens=2))
        await settle()
        assert router.dispatcher.num_waiting == 2
        router.fakes["prefill-0"].resume()
        assert (await broke).status_code == 500
        for task in (first, last):
            assert (await task)["usage"]["completion_tokens"] == 2

    serve(scenario, dispatch_ahead_s=0.01)


def test_a_lease_is_released_once_however_often_it_is_ended(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        held: list[Any] = []
        real: Callable[..., Any] = WorkerState.assign

        def kept(worker: WorkerState, *args: Any) -> Any:
            held.append(real(worker, *args))
            return held[-1]

        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(WorkerState, "assign", kept)
            await router.complete(prompt="hello", max_tokens=3)
        loads = counters(router)["loads"]
        assert len(held) == 2
        for lease in held:
            lease.release()
            with lease:
                pass
        assert counters(router)["loads"] == loads == [(0, 0, 0), (0, 0, 0)]

    serve(scenario)

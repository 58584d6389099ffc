"""Streams written where their tokens arrive equal the streams written by the request's task."""

import asyncio
import json
import re
import threading
from typing import Any

import pytest

from baton_serve.contracts.messages import EncodedLogprobs, TokenLogprobs, Tokens, Work
from baton_serve.contracts.prompt_logprobs import decode_logprobs
from baton_serve.services.common.http.exchange import EXTENSION, Exchange
from baton_serve.services.router.api import chat, completions
from baton_serve.services.router.protocol.errors import ClientGoneError
from baton_serve.services.router.protocol.request_bounds import MAX_QUEUED_TOKENS
from baton_serve.services.router.requests.token_queue import TokenQueue
from baton_serve.services.router.text.logprobs import LogprobWriter
from baton_serve.services.router.text.token_sequence import NewTokens, TokenUpdate
from tests.recorded_connection import RecordedConnection
from tests.unit.router.conftest import Router, Serve, events_of, settle
from tests.unit.router.test_message_reader import CALL, HERMES, TOOLS, writes

JSON = (b"content-type", b"application/json")
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12}
TEXT: dict[str, Any] = {"prompt": "hello", "max_tokens": 12}
OWN = re.compile(r'"created(?:_at)?":\d+|(?:call|toolu|fc|msg|rs)_[0-9a-f]{8,}')
"""Parts that differ from answer to answer."""

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "n": 3}),
    ("/v1/chat/completions", {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {**CHAT, "stop": ["vc"]}),
    ("/v1/chat/completions", {**CHAT, "n": 2, "stop": ["xe"], "include_stop_str_in_output": True}),
    ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 1}),
    ("/v1/chat/completions", {**CHAT, "best_of": 3, "n": 2}),
    ("/v1/completions", TEXT),
    ("/v1/completions", {**TEXT, "prompt": ["hello", "you"], "n": 2, "logprobs": 1, "echo": True}),
    ("/v1/completions", {**TEXT, "echo": True, "max_tokens": 1}),
    ("/v1/completions", {**TEXT, "stop_token_ids": [118], "stream_options": {"include_usage": True}}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 12}),
    ("/v1/messages", CHAT),
]


def letters(work: Work, sequence: int, position: int) -> int:
    return 97 + (5 * sequence + 7 * position) % 26


async def both(router: Router, path: str, body: dict[str, Any]) -> list[str]:
    """The stream as any ASGI server gets it, and as one gets it that takes pieces at once."""
    content = json.dumps({"model": "tiny", **body, "stream": True}).encode()
    headers = {"x-request-id": "r", "content-type": "application/json"}
    by_the_task = await router.http.post(path, content=content, headers=headers)
    assert by_the_task.status_code == 200, by_the_task.text
    connection = RecordedConnection()
    exchange = Exchange(connection, is_http_10=False, is_head=False, keeps_alive=True)
    exchange.on_body(content)
    exchange.on_received()
    scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"x-request-id", b"r"), JSON]}
    await exchange.run(router.app, {**scope, "extensions": {EXTENSION: exchange}})
    assert connection.completed_ones == [exchange]
    return [OWN.sub("", text) for text in (by_the_task.text, connection.body().decode())]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_both_ways_write_the_same_events(serve: Serve, path: str, body: dict[str, Any]) -> None:
    async def test(router: Router) -> None:
        router.fakes.token_of = letters
        by_the_task, at_once = await both(router, path, body)
        assert at_once == by_the_task and "data: " in at_once

    serve(test)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_both_ways_write_the_same_reasoning_and_calls(serve: Serve, path: str) -> None:
    async def test(router: Router) -> None:
        router.fakes.token_of = writes("<think>\nHm.\n</think>\n\nSo.\n" + CALL.format("f") + "\n" + CALL.format("g"))
        tools = TOOLS if path == "/v1/chat/completions" else [{"name": "f", "input_schema": {"type": "object"}}]
        by_the_task, at_once = await both(router, path, {**CHAT, "max_tokens": 200, "tools": tools})
        assert at_once == by_the_task and '"f"' in at_once

    serve(test, **HERMES)


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"best_of": 3}])
def test_many_logprobs_of_a_stream_are_formatted_beside_the_event_loop(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    threads: dict[int, set[str]] = {}
    write = LogprobWriter.completion

    def noted(writer: LogprobWriter, token_ids: list[int], *args: Any, **kwargs: Any) -> Any:
        threads.setdefault(len(token_ids), set()).add(threading.current_thread().name)
        return write(writer, token_ids, *args, **kwargs)

    async def scenario(router: Router) -> None:
        monkeypatch.setattr(LogprobWriter, "completion", noted)
        body = {"prompt": [97] * 60, "echo": True, "logprobs": 10, "max_tokens": 60, "seed": 0, **more}
        by_the_task, at_once = await both(router, "/v1/completions", body)
        assert at_once == by_the_task
        assert all(name.startswith("answers") for name in threads[60]), threads
        # A delta that arrives while another one is formatted is formatted after it, in the thread. Only a stream whose
        # deltas are all short can show that single tokens need no thread.
        threads.clear()
        await both(router, "/v1/completions", {**body, "echo": False, "max_tokens": 3})
        if "best_of" not in more:  # its sequences are written at the end, whole
            assert threads[1] == {threading.main_thread().name}, "single tokens need no thread"

    serve(scenario)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [97] * 60, "prompt_logprobs": 10}),
        ("/v1/completions", {"prompt": [97] * 60, "echo": True, "logprobs": 10}),
        ("/v1/completions", {"prompt": [97] * 60, "echo": True, "logprobs": 10, "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 60}], "prompt_logprobs": 10}),
    ],
)
def test_many_logprobs_of_a_prompt_are_decoded_beside_the_event_loop(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    threads: set[str] = set()

    def noted(encoded: EncodedLogprobs) -> list[TokenLogprobs | None]:
        threads.add(threading.current_thread().name)
        return decode_logprobs(encoded)

    async def scenario(router: Router) -> None:
        monkeypatch.setattr(completions, "decode_logprobs", noted)
        monkeypatch.setattr(chat, "decode_logprobs", noted)
        answer = await router.http.post(path, json={**body, "max_tokens": 2, "seed": 0})
        assert answer.status_code == 200
        assert threads and all(name.startswith("answers") for name in threads), threads

    serve(scenario)


def test_a_token_is_written_before_the_call_that_brought_it_returns(serve: Serve) -> None:
    async def test(router: Router) -> None:
        router.fakes.token_of = letters
        decode, connection = router.fakes["decode-0"], RecordedConnection()
        decode.hold = 0
        exchange = Exchange(connection, is_http_10=False, is_head=False, keeps_alive=True)
        exchange.on_body(json.dumps({**TEXT, "stream": True}).encode())
        exchange.on_received()
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [JSON]}
        running = asyncio.create_task(exchange.run(router.app, {**scope, "extensions": {EXTENSION: exchange}}))
        await settle()
        (first,) = connection.written
        (asked,) = decode.assignments()
        request_id, token = asked.work.request_id, letters(asked.work, 0, 1)
        decode.send(Tokens(request_id=request_id, sequence=0, position=1, token_ids=[token]))
        assert connection.written[0] == first and f'"text":"{chr(token)}"'.encode() in connection.written[1]
        decode.resume()
        await running

    serve(test)


def test_a_client_that_is_slow_in_between_gets_the_same(serve: Serve) -> None:
    async def test(router: Router) -> None:
        taken: list[bool] = []

        class Hesitant(RecordedConnection):
            def write(self, data: bytes) -> None:
                super().write(data)
                taken.append(self.is_write_paused)
                self.pause(len(self.written) in (3, 4, 7))

            def pause(self, is_paused: bool) -> None:
                self.is_write_paused = is_paused
                exchange.on_write_paused(is_paused)

            async def writable(self) -> None:
                await settle()
                self.pause(False)

        router.fakes.token_of = letters
        at_once = await router.stream("/v1/completions", **TEXT)
        connection = Hesitant()
        exchange = Exchange(connection, is_http_10=False, is_head=False, keeps_alive=True)
        exchange.on_body(json.dumps({**TEXT, "stream": True}).encode())
        exchange.on_received()
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [JSON]}
        await exchange.run(router.app, {**scope, "extensions": {EXTENSION: exchange}})
        texts = [event["choices"][0]["text"] for event in events_of(connection.body().decode())]
        assert texts == [event["choices"][0]["text"] for event in at_once]
        assert not any(taken), "nothing is written to a client that does not keep up"

    serve(test)


def new(*token_ids: int) -> NewTokens:
    return NewTokens(list(token_ids), None, None, None)


def test_tokens_are_taken_in_the_call_that_brings_them_while_somebody_waits() -> None:
    async def scenario() -> None:
        token_queue, taken = TokenQueue(), list[int]()

        def at_once(choice: int, tokens: TokenUpdate, at: float) -> bool:
            if tokens.token_ids[0] < 0:
                return False
            taken.extend(tokens.token_ids)
            return True

        token_queue.put(0, new(1), 0.0)
        assert [output.tokens.token_ids for output in await token_queue.take(at_once)] == [[1]]
        waiting = asyncio.create_task(token_queue.take(at_once))
        await settle()
        token_queue.put(0, new(2), 0.0)
        token_queue.put(1, new(3), 0.0)
        assert taken == [2, 3] and not waiting.done()
        token_queue.put(0, new(-4), 0.0)
        token_queue.put(0, new(5), 0.0)
        assert taken == [2, 3], "what comes after one that is not taken must not overtake it"
        assert [output.tokens.token_ids for output in await waiting] == [[-4], [5]]
        token_queue.put(0, new(6), 0.0)
        assert taken == [2, 3], "nobody waits"

    asyncio.run(scenario())


def test_an_immediate_failure_is_raised_in_the_consumer() -> None:
    async def scenario() -> None:
        token_queue = TokenQueue()

        def at_once(choice: int, tokens: TokenUpdate, at: float) -> bool:
            raise ZeroDivisionError

        waiting = asyncio.create_task(token_queue.take(at_once))
        await settle()
        token_queue.put(0, new(1), 0.0)
        with pytest.raises(ZeroDivisionError):
            await waiting

    asyncio.run(scenario())


class Deaf(RecordedConnection):
    """Takes the first piece of a response and nothing more until `may_write` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = asyncio.Event()
        self.is_broken_off = False
        self.exchange = Exchange(self, is_http_10=False, is_head=False, keeps_alive=True)

    def write(self, data: bytes) -> None:
        super().write(data)
        self.is_write_paused = not self.may_write.is_set()
        self.exchange.on_write_paused(self.is_write_paused)

    async def writable(self) -> None:
        await self.may_write.wait()
        self.is_write_paused = False

    def break_off(self) -> None:
        self.is_broken_off = True


def test_a_client_that_does_not_read_ends_its_generation_when_too_much_waits_for_it(serve: Serve) -> None:
    async def test(router: Router) -> None:
        connection = Deaf()
        exchange = connection.exchange
        # 64 sequences with 21 logprobs for each token reach the bound long before their last tokens.
        body = {"prompt": [5], "max_tokens": 240, "n": 64, "logprobs": 20, "stream": True, "ignore_eos": True}
        exchange.on_body(json.dumps(body).encode())
        exchange.on_received()
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [JSON]}
        request = asyncio.create_task(exchange.run(router.app, {**scope, "extensions": {EXTENSION: exchange}}))
        while not router.fakes["decode-0"].cancels():
            await settle(1)
        assert router.dispatcher.num_running == 0
        connection.may_write.set()
        await request
        assert connection.is_broken_off, "the client must not take the answer for complete"

    serve(test)


def test_a_task_that_waits_may_get_any_number_of_tokens_at_once() -> None:
    async def scenario() -> None:
        token_queue = TokenQueue()
        waiting = asyncio.create_task(token_queue.take())
        await settle()
        for _ in range(40):
            token_queue.put(0, new(*range(MAX_QUEUED_TOKENS // 20)), 0.0)
        assert len(await waiting) == 40

    asyncio.run(scenario())


def test_tokens_beyond_the_bound_of_the_queue_are_dropped_and_reported_once() -> None:
    async def scenario() -> None:
        token_queue, overflows = TokenQueue(), list[bool]()
        token_queue.on_overflow = lambda: overflows.append(True)
        for _ in range(1000):
            token_queue.put(0, new(*range(MAX_QUEUED_TOKENS // 100)), 0.0)
        await settle()
        assert overflows == [True]
        assert len(await token_queue.take()) == 100
        with pytest.raises(ClientGoneError):
            await token_queue.take()

    asyncio.run(scenario())

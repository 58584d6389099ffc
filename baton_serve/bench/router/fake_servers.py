"""OpenAI-compatible servers without a model, as backends of other routers: each answers any request at once.

`python -m baton_serve.bench.router.fake_servers MODEL` runs one in a process of its own. It prints its port and ends
when its stdin ends.
"""

import asyncio
import json
import sys
from typing import cast

import uvloop

_END_OF_HEAD = b"\r\n\r\n"
_TEXT = " sixteen words of an answer that nobody wrote and that everybody gets whatever they ask".strip()


def _json(body: object) -> bytes:
    content = json.dumps(body).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


def _chat(model: str) -> bytes:
    usage = {"prompt_tokens": 21, "completion_tokens": 16, "total_tokens": 37}
    choice = {"index": 0, "message": {"role": "assistant", "content": _TEXT}, "finish_reason": "length"}
    return _json({"id": "fake", "object": "chat.completion", "model": model, "choices": [choice], "usage": usage})


def _streamed_chat(model: str) -> bytes:
    events: list[dict[str, object]] = [
        {"index": 0, "delta": {"role": "assistant", "content": ""}},
        {"index": 0, "delta": {"content": _TEXT}, "finish_reason": "length"},
    ]
    head = {"id": "fake", "object": "chat.completion.chunk", "model": model}
    lines = [f"data: {json.dumps(head | {'choices': [event]})}\n\n" for event in events]
    body = "".join([*lines, "data: [DONE]\n\n"]).encode()
    start = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return start + f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"


class FakeServer:
    """One backend. `port` is known after `start`. Answers are encoded once, so that the server costs almost no time."""

    def __init__(self, model: str) -> None:
        self.port = 0
        self.answers = (_chat(model), _streamed_chat(model))
        card = {"id": model, "object": "model", "created": 1, "owned_by": "bench", "root": model, "parent": None}
        self.models = _json({"object": "list", "data": [card]})
        self.healthy = _json({})

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        self._server.close()


class _Connection(asyncio.Protocol):
    """Parses just enough of HTTP to find the ends of requests."""

    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(_END_OF_HEAD)) >= 0:
            head, size = self._buffer[:end], end + len(_END_OF_HEAD)
            if head.startswith(b"POST"):
                length = _body_size(head.lower(), self._buffer[size:])
                if length is None or len(self._buffer) < size + length:
                    return
                size += length
            self._answer(head, self._buffer[:size])
            self._buffer = self._buffer[size:]

    def _answer(self, head: bytes, request: bytes) -> None:
        if head.startswith(b"POST"):
            is_streamed = b'"stream":true' in request or b'"stream": true' in request
            self._transport.write(self._server.answers[is_streamed])
        else:
            self._transport.write(self._server.models if b"/v1/models" in head else self._server.healthy)


def _body_size(head: bytes, rest: bytes) -> int | None:
    """Return the bytes of a request's body as sent, or None if its end has not arrived."""
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name == b"content-length":
            return int(value)
        if name == b"transfer-encoding" and b"chunked" in value:
            end = rest.find(b"0\r\n\r\n")
            return end + 5 if end >= 0 else None
    return 0


async def main(model: str) -> None:
    server = FakeServer(model)
    await server.start()
    print(server.port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))

"""Asks a router as any client does: streamed chat over HTTP, with the explanation of where the time went."""

from collections.abc import AsyncIterator

import httpx
import msgspec

from baton_serve.services.common.errors import RemoteError

MAX_TOKENS = 60


class AnswerError(RemoteError):
    """The router refused, or its stream broke."""


class TimeSplit(msgspec.Struct, frozen=True, kw_only=True):
    """The `baton` field of a stream's last chunk: where the time went (seconds)."""

    decision: str
    cached_tokens: dict[str, int] = {}
    ttft_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    handoff_s: float | None = None
    handoff_exposed_s: float | None = None
    transport: str | None = None
    transferred_blocks: int | None = None
    transferred_bytes: int | None = None
    reused_blocks: int | None = None


class DemoUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int


class ChatChunkDelta(msgspec.Struct, frozen=True):
    content: str | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True):
    delta: ChatChunkDelta


class ChatChunk(msgspec.Struct, frozen=True):
    choices: list[ChatChunkChoice] = []
    usage: DemoUsage | None = None
    baton: TimeSplit | None = None


class InstanceLinkSpeed(msgspec.Struct, frozen=True):
    peer: str
    transport: str
    gigabytes_per_second: float


class Instance(msgspec.Struct, frozen=True):
    instance: str
    links: list[InstanceLinkSpeed] = []


class ClusterHealth(msgspec.Struct, frozen=True):
    instances: list[Instance]


async def stream_chat(client: httpx.AsyncClient, question: str) -> AsyncIterator[ChatChunk]:
    """Raises `AnswerError`; a stream that ends before its `[DONE]` is one."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"x-baton-explain": "1"}
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        if answer.status_code != 200:
            raise AnswerError(f"status {answer.status_code}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                yield msgspec.json.decode(line.removeprefix("data: "), type=ChatChunk)
    raise AnswerError("the stream ended before it was complete")


async def read_health(client: httpx.AsyncClient) -> ClusterHealth:
    answer = await client.get("/health")
    return msgspec.json.decode(answer.content, type=ClusterHealth)

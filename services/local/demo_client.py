"""The demo's HTTP client: streams chat completions from a router, with the time split that `x-baton-explain` adds, and
lets the model call tools."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import msgspec

from baton_serve.services.common.errors import RemoteError

MAX_TOKENS = 60
"""Longest answer to a question of the demo, in tokens."""


class AnswerError(RemoteError):
    """The server answered with an error status or cannot be reached, or its answer ended too early."""


class TimeSplit(msgspec.Struct, frozen=True, kw_only=True):
    """The field `baton` of a stream's last chunk: how the time of the request divides into phases, in seconds.

    The request header `x-baton-explain: 1` asks for it. A phase that did not happen is None.
    """

    decision: str
    cached_tokens: dict[str, int] = {}
    ttft_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    handoff_s: float | None = None
    handoff_exposed_s: float | None = None
    """Part of the handoff after prefill had finished computing: only this part delays the second token."""
    transport: str | None = None
    transferred_blocks: int | None = None
    transferred_bytes: int | None = None
    reused_blocks: int | None = None
    """KV blocks of the prompt that the decode worker had in its prefix cache, so they were not transferred."""


class DemoUsage(msgspec.Struct, frozen=True):
    """The numbers of prompt and completion tokens of one answer, as OpenAI's `usage`."""

    prompt_tokens: int
    completion_tokens: int


class ChatChunkDelta(msgspec.Struct, frozen=True):
    """The new text of one choice in a chunk of a streamed chat answer."""

    content: str | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """One choice of a chunk of a streamed chat answer."""

    delta: ChatChunkDelta


class ChatChunk(msgspec.Struct, frozen=True):
    """One chunk (event) of a streamed chat answer; fields that the demo does not use are ignored."""

    choices: list[ChatChunkChoice] = []
    usage: DemoUsage | None = None
    baton: TimeSplit | None = None


class DemoFunction(msgspec.Struct, frozen=True):
    """The function that a tool call of the model names. `arguments` is JSON text."""

    name: str
    arguments: str


class DemoToolCall(msgspec.Struct, frozen=True):
    """One tool call in an answer of the model."""

    id: str
    function: DemoFunction
    type: str = "function"


class DemoMessage(msgspec.Struct, frozen=True):
    """The message in an answer of the model: a text, or tool calls."""

    role: str
    content: str | None = None
    tool_calls: list[DemoToolCall] = []


class DemoChoice(msgspec.Struct, frozen=True):
    """One choice of an answer that is not streamed."""

    message: DemoMessage


class DemoAnswer(msgspec.Struct, frozen=True):
    """An answer that is not streamed; fields that the demo does not use are ignored."""

    choices: list[DemoChoice]


class InstanceLinkSpeed(msgspec.Struct, frozen=True):
    """The measured rate of KV transfers from the instance `peer` to another instance, as the router's
    /health shows it.
    """

    peer: str
    transport: str
    gigabytes_per_second: float


class Instance(msgspec.Struct, frozen=True):
    """One instance in the router's /health, with the rates of KV transfers that it has received."""

    instance: str
    links: list[InstanceLinkSpeed] = []


class ClusterHealth(msgspec.Struct, frozen=True):
    """The part of the router's /health that the demo reads."""

    instances: list[Instance]


async def stream_chat(client: httpx.AsyncClient, question: str) -> AsyncIterator[ChatChunk]:
    """Send one question to the router and yield the chunks of its streamed answer.

    Raises `AnswerError` if the status is not 200 or if the stream ends before its `[DONE]`.
    """
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


async def chat_with_tools(
    client: httpx.AsyncClient, messages: Sequence[object], tools: Sequence[dict[str, Any]]
) -> DemoMessage:
    """Send a conversation that offers `tools` to the router, and return the message of the answer. Raises `AnswerError`
    if the status is not 200.
    """
    body = {"messages": messages, "tools": tools, "max_tokens": MAX_TOKENS, "temperature": 0}
    headers = {"content-type": "application/json"}
    answer = await client.post("/v1/chat/completions", content=msgspec.json.encode(body), headers=headers)
    if answer.status_code != 200:
        raise AnswerError(f"status {answer.status_code}: {answer.text}")
    return msgspec.json.decode(answer.content, type=DemoAnswer).choices[0].message


async def read_health(client: httpx.AsyncClient) -> ClusterHealth:
    """Return the instances, with the rates of their KV transfers, from the router's /health."""
    answer = await client.get("/health")
    return msgspec.json.decode(answer.content, type=ClusterHealth)

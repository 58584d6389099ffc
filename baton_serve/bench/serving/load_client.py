"""Send requests at their times to an OpenAI-compatible server, and measure when the tokens of each answer arrive.

Token counts come from the server's usage. As in vLLM's benchmark, the arrival of a chunk counts as the arrival of one
token.
"""

import asyncio
import base64
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import httpx

from baton_serve.bench.serving.workload import BenchRequest

Backend = Literal["vllm", "openai", "openai-chat", "openai-embeddings"]
ENDPOINTS: dict[Backend, str] = {
    "vllm": "/v1/completions",
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "openai-embeddings": "/v1/embeddings",
}
"""The path of each backend, under vLLM's names. `vllm` and `openai` are the same API."""


@dataclass(slots=True)
class RequestOutcome:
    """Times of one request in seconds; `itls_s` are the gaps between chunks. `error` is None if it succeeded."""

    ttft_s: float = 0.0
    latency_s: float = 0.0
    itls_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; None if the server does not report them."""
    to_step_s: float | None = None
    """Seconds from prefill's end to decode's first step; only with the header x-baton-explain."""
    held_s: float = 0.0
    """Part of TTFT for which the router held back the first token; only with x-baton-explain."""
    decision: str = ""
    """Placement decision, such as `disaggregated`; only with x-baton-explain."""
    error: str | None = None
    started_s: float = 0.0
    """When the request was sent, on the monotonic clock."""
    queued_s: float = 0.0
    """How long the request waited in this client, because of `max_concurrency`."""
    text: str = ""

    @property
    def tpot_s(self) -> float:
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """The server and what each request to it contains.

    `model` None stands for the first model that the server lists. `extra` is added to each body and replaces its
    fields. `adapters` are names of LoRA adapters that requests name in turn instead of `model`.
    """

    base_url: str
    model: str | None = None
    backend: Backend = "openai"
    endpoint: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    request_id_prefix: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()
    ignore_eos: bool = True
    temperature: float | None = 0.0
    max_concurrency: int | None = None
    timeout_s: float = 600.0
    verify_tls: bool = True

    def path(self) -> str:
        return self.endpoint or ENDPOINTS[self.backend]


async def drive(
    requests: Sequence[BenchRequest], target: BenchTarget, *, on_end: Callable[[], object] = lambda: None
) -> tuple[list[RequestOutcome], float]:
    """Send each request at its time, at most `max_concurrency` at once. Return outcomes in order, and the seconds
    until the last one ended. `on_end` is called after each request."""
    gate = asyncio.Semaphore(target.max_concurrency or max(1, len(requests)))
    async with connect(target) as client:
        if target.model is None:
            target = replace(target, model=await first_model(client))
        bodies = [body(request, target, number) for number, request in enumerate(requests)]
        started = time.perf_counter()

        async def one(number: int, request: BenchRequest) -> RequestOutcome:
            await asyncio.sleep(max(0.0, request.at_s - (time.perf_counter() - started)))
            arrived = time.perf_counter()
            async with gate:
                headers = {"x-request-id": f"{target.request_id_prefix}{number}"} if target.request_id_prefix else {}
                outcome = await send(client, target.path(), bodies[number], headers)
            outcome.queued_s = outcome.started_s - arrived
            on_end()
            return outcome

        outcomes = await asyncio.gather(*(one(number, request) for number, request in enumerate(requests)))
        return outcomes, time.perf_counter() - started


def connect(target: BenchTarget) -> httpx.AsyncClient:
    """Return a client for the server of `target`; the caller closes it."""
    # httpx allows 100 connections by default, which would limit the concurrency unnoticed.
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(
        base_url=target.base_url,
        timeout=target.timeout_s,
        limits=limits,
        headers=target.headers,
        verify=target.verify_tls,
    )


async def first_model(client: httpx.AsyncClient) -> str:
    """Return the first model that the server lists. Raises `httpx.HTTPError`."""
    answer = (await client.get("/v1/models")).raise_for_status()
    name: str = answer.json()["data"][0]["id"]
    return name


def body(request: BenchRequest, target: BenchTarget, number: int) -> dict[str, Any]:
    """Return the JSON body of the request with this number."""
    model = target.adapters[number % len(target.adapters)] if target.adapters else target.model
    if target.backend == "openai-embeddings":
        return {"model": model, "input": request.prompt, **target.extra}
    found: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if target.backend == "openai-chat":
        found |= {"messages": [{"role": "user", "content": _content(request)}]}
        found |= {"max_completion_tokens": request.max_tokens}
    else:
        found |= {"prompt": request.prompt, "max_tokens": request.max_tokens}
    if target.temperature is not None:
        found["temperature"] = target.temperature
    if target.ignore_eos:
        found["ignore_eos"] = True
    return found | target.extra


def _content(request: BenchRequest) -> str | list[int] | list[dict[str, Any]]:
    """Return the content of a chat's message: the text alone, or parts with the images behind it."""
    if not request.images:
        return request.prompt
    found: list[dict[str, Any]] = [{"type": "text", "text": request.prompt}]
    for image in request.images:
        url = f"data:image/jpeg;base64,{base64.b64encode(image).decode()}"
        found.append({"type": "image_url", "image_url": {"url": url}})
    return found


async def send(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> RequestOutcome:
    """Send one request and return its outcome. HTTP errors go to `error`; they are not raised."""
    outcome = RequestOutcome(started_s=time.perf_counter())
    last = outcome.started_s
    try:
        async with client.stream("POST", path, json=body, headers=headers) as answer:
            if answer.status_code != 200:
                outcome.error = f"{answer.status_code}: {(await answer.aread()).decode(errors='replace')[:200]}"
            elif body.get("stream"):
                last = await _read_stream(answer.aiter_lines(), outcome)
            else:
                _read_usage(json.loads(await answer.aread()), outcome)
                last = time.perf_counter()
    except (httpx.HTTPError, ValueError) as exc:
        outcome.error = repr(exc)
    outcome.latency_s = last - outcome.started_s
    return outcome


async def _read_stream(lines: AsyncIterator[str], outcome: RequestOutcome) -> float:
    """Read a stream to its end and return the arrival of the last token, so that the usage chunk at the end does not
    count as latency."""
    last = outcome.started_s
    async for line in lines:
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        now = time.perf_counter()
        chunk = json.loads(line[6:])
        _read_usage(chunk, outcome)
        if isinstance(baton := chunk.get("baton"), dict):
            outcome.to_step_s = baton.get("handoff_to_step_s")
        if "error" in chunk:
            outcome.error = str(chunk["error"])
        if not chunk.get("choices") or not _has_token(chunk["choices"][0], outcome):
            continue
        if outcome.ttft_s == 0.0:
            outcome.ttft_s = now - outcome.started_s
        else:
            outcome.itls_s.append(now - last)
        last = now
    if outcome.ttft_s == 0.0 and outcome.error is None:
        outcome.error = "the answer has no token"
    return last


def _has_token(choice: dict[str, Any], outcome: RequestOutcome) -> bool:
    """Return whether a chunk is the arrival of a token, and add its text to the outcome.

    A chat's first chunk names only the role, and its last one only the reason of its end.
    """
    delta = choice.get("delta")
    if delta is None:
        outcome.text += choice.get("text") or ""
        return True
    outcome.text += delta.get("content") or ""
    return any(delta.get(name) for name in ("content", "reasoning", "reasoning_content", "tool_calls"))


def _read_usage(chunk: dict[str, Any], outcome: RequestOutcome) -> None:
    if usage := chunk.get("usage"):
        outcome.prompt_tokens = usage["prompt_tokens"]
        outcome.output_tokens = usage.get("completion_tokens", 0)
        outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


async def wait_until_ready(request: BenchRequest, target: BenchTarget, *, timeout_s: float) -> None:
    """Send one request every second until one succeeds. Raises `SystemExit` after `timeout_s` seconds, or at once if
    the server refuses the request itself."""
    deadline, error = time.monotonic() + timeout_s, ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            outcomes, _ = await drive([replace(request, at_s=0.0)], replace(target, timeout_s=left))
            error = outcomes[0].error or ""
        except (httpx.HTTPError, KeyError, IndexError) as exc:
            error = repr(exc)
        if not error:
            return
        if error.startswith(("400", "401", "404", "422")) and target.model is not None:
            raise SystemExit(f"baton-bench serve: the server refused the first request: {error}")
        await asyncio.sleep(min(1.0, max(0.0, deadline - time.monotonic())))
    raise SystemExit(
        f"baton-bench serve: {target.base_url} answered no request within {timeout_s:g} s; the last error was "
        f"{error}. Start the server first, or raise --ready-check-timeout-sec"
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile with linear interpolation, as numpy does. `values` must not be empty."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

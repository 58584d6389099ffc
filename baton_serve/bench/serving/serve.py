"""Send load to any OpenAI-compatible completions endpoint and print the report of `vllm bench serve`.

Token counts come from the server's usage. As in vLLM's benchmark, the arrival of a chunk counts as the arrival of one
token.
"""

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from baton_serve.bench.report import Row, show
from baton_serve.bench.serving.traces import TraceError, load_trace
from baton_serve.bench.serving.workload import BenchRequest, random_requests, trace_requests


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

    @property
    def tpot_s(self) -> float:
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


async def send(client: httpx.AsyncClient, request: BenchRequest, options: argparse.Namespace) -> RequestOutcome:
    """Stream one request and return its outcome. HTTP errors go to `error`; they are not raised."""
    outcome = RequestOutcome()
    body = {
        "model": options.model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    } | ({"ignore_eos": True} if options.ignore_eos else {})
    # `last` is the arrival of the last token, so that the usage chunk at the end does not count as latency.
    started = last = time.perf_counter()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                outcome.error = f"{answer.status_code}: {(await answer.aread()).decode()[:200]}"
                return outcome
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                now = time.perf_counter()
                chunk = json.loads(line[6:])
                if usage := chunk.get("usage"):
                    outcome.prompt_tokens = usage["prompt_tokens"]
                    outcome.output_tokens = usage["completion_tokens"]
                    outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
                if isinstance(baton := chunk.get("baton"), dict):
                    outcome.to_step_s = baton.get("handoff_to_step_s")
                if not chunk.get("choices"):
                    continue
                if outcome.ttft_s == 0.0:
                    outcome.ttft_s = now - started
                else:
                    outcome.itls_s.append(now - last)
                last = now
    except httpx.HTTPError as exc:
        outcome.error = repr(exc)
    outcome.latency_s = last - started
    return outcome


async def drive(requests: list[BenchRequest], options: argparse.Namespace) -> tuple[list[RequestOutcome], float]:
    """Send each request at its time, at most `max_concurrency` at once. Return outcomes in order, and the seconds
    until the last one ended."""
    gate = asyncio.Semaphore(options.max_concurrency or len(requests))
    # httpx allows 100 connections by default, which would limit the concurrency unnoticed.
    limits = httpx.Limits(max_connections=None)
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    if getattr(options, "explain", False):
        headers["x-baton-explain"] = "1"
    async with httpx.AsyncClient(
        base_url=options.base_url, timeout=getattr(options, "timeout_s", 600), limits=limits, headers=headers
    ) as client:
        if options.model is None:
            options.model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        started = time.perf_counter()

        async def one(request: BenchRequest) -> RequestOutcome:
            await asyncio.sleep(max(0.0, request.at_s - (time.perf_counter() - started)))
            async with gate:
                return await send(client, request, options)

        outcomes = await asyncio.gather(*(one(request) for request in requests))
        return outcomes, time.perf_counter() - started


def percentile(values: list[float], percent: float) -> float:
    """Return a percentile with linear interpolation, to a tenth of a percent."""
    return (
        statistics.quantiles(values, n=1000, method="inclusive")[round(percent * 10) - 1]
        if len(values) > 1
        else values[0]
    )


def summarise(outcomes: list[RequestOutcome], duration_s: float, options: argparse.Namespace) -> list[Row]:
    """Return the rows of `vllm bench serve`'s report. Raises `SystemExit` if no request succeeded."""
    good = [o for o in outcomes if o.error is None]
    if not good:
        raise SystemExit(f"baton-bench serve: no request succeeded; the first error was {outcomes[0].error}")
    tokens_in, tokens_out = sum(o.prompt_tokens for o in good), sum(o.output_tokens for o in good)
    within = [
        o for o in good if o.ttft_s * 1e3 <= options.goodput_ttft_ms and o.tpot_s * 1e3 <= options.goodput_tpot_ms
    ]
    rows = [
        ("Successful requests", len(good), ""),
        ("Failed requests", len(outcomes) - len(good), ""),
        ("Benchmark duration", duration_s, "s"),
        ("Total input tokens", tokens_in, ""),
        ("Total generated tokens", tokens_out, ""),
        ("Request throughput", len(good) / duration_s, "req/s"),
        ("Request goodput", len(within) / duration_s, "req/s"),
        ("Output token throughput", tokens_out / duration_s, "tok/s"),
        ("Total token throughput", (tokens_in + tokens_out) / duration_s, "tok/s"),
    ]
    for name, values in (
        ("TTFT", [o.ttft_s for o in good]),
        ("TPOT", [o.tpot_s for o in good if o.output_tokens > 1]),
        ("ITL", [itl for o in good for itl in o.itls_s]),
        ("E2EL", [o.latency_s for o in good]),
    ):
        if values:
            rows += [
                (f"Mean {name}", statistics.fmean(values) * 1e3, "ms"),
                (f"Median {name}", statistics.median(values) * 1e3, "ms"),
                (f"P99 {name}", percentile(values, 99) * 1e3, "ms"),
            ]
    return [Row(bench="serve", case=case, value=float(value), unit=unit) for case, value, unit in rows]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="baton-bench serve", description=__doc__)
    made.add_argument("--base-url", default="http://127.0.0.1:8000", help="URL of the server")
    made.add_argument("--model", help="model name in requests (default: the first one of /v1/models)")
    made.add_argument("--api-key", help="API key for the server")
    made.add_argument(
        "--dataset-name", choices=("random", "trace"), default="random", help="random prompts, or a trace file"
    )
    made.add_argument(
        "--dataset-path", type=Path, help="trace file for --dataset-name trace: Azure's .csv or Mooncake's .jsonl"
    )
    made.add_argument("--length-scale", type=float, default=1.0, help="factor for the lengths of a trace")
    made.add_argument("--time-scale", type=float, default=1.0, help="factor for the times of a trace")
    made.add_argument("--num-prompts", type=int, default=100, help="number of requests")
    made.add_argument(
        "--random-input-len", type=int, default=1024, help="prompt tokens of random requests, approximately"
    )
    made.add_argument("--random-output-len", type=int, default=128, help="output tokens of random requests")
    made.add_argument(
        "--random-range-ratio", type=float, default=0.0, help="relative variation of the lengths: 0.1 means ±10 %%"
    )
    made.add_argument(
        "--request-rate",
        type=float,
        default=float("inf"),
        help="requests per second with Poisson arrivals (default: all at once)",
    )
    made.add_argument("--max-concurrency", type=int, help="most concurrent requests (default: no limit)")
    made.add_argument("--ignore-eos", action="store_true", help="generate all output tokens, even after the end token")
    made.add_argument("--goodput-ttft-ms", type=float, default=float("inf"), help="TTFT target of a good request in ms")
    made.add_argument("--goodput-tpot-ms", type=float, default=float("inf"), help="TPOT target of a good request in ms")
    made.add_argument("--num-warmups", type=int, default=1, help="requests that are sent first and not counted")
    made.add_argument("--seed", type=int, default=0, help="seed of prompts and arrival times")
    made.add_argument("--json", action="store_true", help="print one JSON object per row")
    return made


def run(arguments: list[str]) -> None:
    options = parser().parse_args(arguments)
    if options.dataset_name == "trace":
        if options.dataset_path is None:
            raise SystemExit("baton-bench serve: --dataset-name trace needs --dataset-path")
        try:
            trace = load_trace(
                options.dataset_path,
                count=options.num_prompts,
                length_scale=options.length_scale,
                time_scale=options.time_scale,
            )
        except TraceError as exc:
            raise SystemExit(f"baton-bench serve: {exc}") from exc
        requests = trace_requests(trace, seed=options.seed)
    else:
        requests = random_requests(
            count=options.num_prompts,
            input_tokens=options.random_input_len,
            output_tokens=options.random_output_len,
            rate_per_s=options.request_rate,
            range_ratio=options.random_range_ratio,
            seed=options.seed,
        )
    for warmup in random_requests(
        count=options.num_warmups,
        input_tokens=64,
        output_tokens=4,
        rate_per_s=float("inf"),
        range_ratio=0,
        seed=-1,
    ):
        asyncio.run(drive([warmup], options))
    outcomes, duration_s = asyncio.run(drive(requests, options))
    show(summarise(outcomes, duration_s, options), as_json=options.json)

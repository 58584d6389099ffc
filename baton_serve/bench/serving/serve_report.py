"""The measures of a run of `baton-bench serve`: as text and JSON with the names of `vllm bench serve`, and as rows."""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton_serve.bench.report import Row
from baton_serve.bench.serving.load_client import RequestOutcome, percentile

TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
"""Headings of the metrics in vLLM's report."""
DETAILS = (
    "input_lens",
    "output_lens",
    "ttfts",
    "itls",
    "latencies",
    "start_times",
    "queue_times",
    "generated_texts",
    "errors",
)
"""Fields of the JSON with one value for each request, which `--save-detailed` keeps."""
WIDTH = 50


@dataclass(frozen=True, slots=True)
class MetricSummary:
    """A latency over all requests or gaps, in ms. `percentiles` has the value of each percentile."""

    mean_ms: float
    median_ms: float
    std_ms: float
    percentiles: dict[float, float]


@dataclass(frozen=True, slots=True)
class ServeMeasures:
    """The sums and rates of a run, and its latencies by metric. `goodput` is None without objectives."""

    outcomes: Sequence[RequestOutcome]
    duration_s: float
    completed: int
    total_input: int
    total_output: int
    goodput: float | None
    peak_tokens_per_s: float
    peak_concurrent: int
    latencies: dict[str, MetricSummary]

    @property
    def failed(self) -> int:
        return len(self.outcomes) - self.completed

    def per_second(self, count: float) -> float:
        return count / self.duration_s


def measure(
    outcomes: Sequence[RequestOutcome],
    duration_s: float,
    *,
    metrics: Sequence[str] = tuple(TITLES),
    percentiles: Sequence[float] = (99.0,),
    objectives: Mapping[str, float] | None = None,
) -> ServeMeasures:
    """Summarize a run. `objectives` are the largest ms of `ttft`, `tpot` or `e2el` with which a request counts for
    goodput. Raises `SystemExit` if no request succeeded."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    if not good:
        raise SystemExit(f"baton-bench: no request succeeded; the first error was {outcomes[0].error}")
    within = [o for o in good if all(_values_s(name, o)[0] * 1e3 <= ms for name, ms in (objectives or {}).items())]
    peak_tokens, peak_concurrent = _peaks(good)
    found = {name: [value for outcome in good for value in _samples_s(name, outcome)] for name in metrics}
    return ServeMeasures(
        outcomes=outcomes,
        duration_s=duration_s,
        completed=len(good),
        total_input=sum(outcome.prompt_tokens for outcome in good),
        total_output=sum(outcome.output_tokens for outcome in good),
        goodput=len(within) / duration_s if objectives else None,
        peak_tokens_per_s=peak_tokens,
        peak_concurrent=peak_concurrent,
        latencies={name: _summarize(values, percentiles) for name, values in found.items() if values},
    )


def _values_s(name: str, outcome: RequestOutcome) -> list[float]:
    """Return the values in seconds that a request adds to a metric."""
    match name:
        case "ttft":
            return [outcome.ttft_s]
        case "tpot":
            return [outcome.tpot_s]
        case "itl":
            return outcome.itls_s
        case _:
            return [outcome.latency_s]


def _samples_s(name: str, outcome: RequestOutcome) -> list[float]:
    """Return the same for latencies: a single token has no time per further token, an embedding no first token."""
    if (name == "tpot" and outcome.output_tokens <= 1) or (name == "ttft" and not outcome.ttft_s):
        return []
    return _values_s(name, outcome)


def _summarize(values_s: Sequence[float], percentiles: Sequence[float]) -> MetricSummary:
    values = [value * 1e3 for value in values_s]
    return MetricSummary(
        mean_ms=statistics.fmean(values),
        median_ms=statistics.median(values),
        std_ms=statistics.pstdev(values),
        percentiles={percent: percentile(values, percent) for percent in percentiles},
    )


def _peaks(good: Sequence[RequestOutcome]) -> tuple[float, int]:
    """Return the most tokens and the most requests in one of the seconds since the first request was sent."""
    start = min(outcome.started_s for outcome in good)
    tokens, requests = Counter[int](), Counter[int]()
    for outcome in good:
        sent = outcome.started_s - start
        requests.update(range(math.floor(sent), math.floor(sent + outcome.latency_s) + 1))
        if outcome.ttft_s:
            at = sent + outcome.ttft_s
            tokens[math.floor(at)] += 1
            for gap in outcome.itls_s:
                at += gap
                tokens[math.floor(at)] += 1
    return float(max(tokens.values(), default=0)), max(requests.values())


def rows(measures: ServeMeasures, bench: str) -> list[Row]:
    """Return the report as rows of `baton-bench`."""
    return [Row(bench=bench, case=case, value=float(value), unit=unit) for case, value, unit in _entries(measures)]


def text(measures: ServeMeasures, *, max_concurrency: int | None = None, request_rate: float = math.inf) -> str:
    """Return the report as `vllm bench serve` prints it."""
    lines = [" Serving Benchmark Result ".center(WIDTH, "=")]
    entries = list(_totals(measures))
    if not math.isinf(request_rate):
        entries.insert(2, ("Request rate configured", request_rate, "RPS"))
    if max_concurrency is not None:
        entries.insert(2, ("Maximum request concurrency", max_concurrency, ""))
    lines += [_line(*entry) for entry in entries]
    for name, summary in measures.latencies.items():
        lines.append(TITLES[name].center(WIDTH, "-"))
        lines += [_line(*entry) for entry in _latency(name, summary)]
    return "\n".join([*lines, "=" * WIDTH, ""])


def _line(case: str, value: float, unit: str) -> str:
    label = f"{case} ({unit}):" if unit else f"{case}:"
    return f"{label:<40} {value if isinstance(value, int) else format(value, '.2f'):<10}".rstrip()


def _entries(measures: ServeMeasures) -> Iterator[tuple[str, float, str]]:
    yield from _totals(measures)
    for name, summary in measures.latencies.items():
        yield from _latency(name, summary)


def _totals(measures: ServeMeasures) -> Iterator[tuple[str, float, str]]:
    yield "Successful requests", measures.completed, ""
    yield "Failed requests", measures.failed, ""
    yield "Benchmark duration", measures.duration_s, "s"
    yield "Total input tokens", measures.total_input, ""
    yield "Total generated tokens", measures.total_output, ""
    yield "Request throughput", measures.per_second(measures.completed), "req/s"
    if measures.goodput is not None:
        yield "Request goodput", measures.goodput, "req/s"
    yield "Output token throughput", measures.per_second(measures.total_output), "tok/s"
    yield "Peak output token throughput", measures.peak_tokens_per_s, "tok/s"
    yield "Peak concurrent requests", measures.peak_concurrent, ""
    yield "Total token throughput", measures.per_second(measures.total_input + measures.total_output), "tok/s"


def _latency(name: str, summary: MetricSummary) -> Iterator[tuple[str, float, str]]:
    yield f"Mean {name.upper()}", summary.mean_ms, "ms"
    yield f"Median {name.upper()}", summary.median_ms, "ms"
    for percent, value in summary.percentiles.items():
        yield f"P{percent:g} {name.upper()}", value, "ms"


def result_fields(measures: ServeMeasures, *, detailed: bool) -> dict[str, Any]:
    """Return the fields of vLLM's result file that the run has measured."""
    outcomes = measures.outcomes
    found: dict[str, Any] = {
        "duration": measures.duration_s,
        "completed": measures.completed,
        "failed": measures.failed,
        "total_input_tokens": measures.total_input,
        "total_output_tokens": measures.total_output,
        "request_throughput": measures.per_second(measures.completed),
        "request_goodput": measures.goodput,
        "output_throughput": measures.per_second(measures.total_output),
        "total_token_throughput": measures.per_second(measures.total_input + measures.total_output),
        "input_lens": [outcome.prompt_tokens for outcome in outcomes],
        "output_lens": [outcome.output_tokens for outcome in outcomes],
        "ttfts": [outcome.ttft_s for outcome in outcomes],
        "itls": [outcome.itls_s for outcome in outcomes],
        "latencies": [outcome.latency_s for outcome in outcomes],
        "start_times": [outcome.started_s for outcome in outcomes],
        "queue_times": [outcome.queued_s for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error or "" for outcome in outcomes],
        "max_output_tokens_per_s": measures.peak_tokens_per_s,
        "max_concurrent_requests": measures.peak_concurrent,
    }
    for name, summary in measures.latencies.items():
        found |= {f"mean_{name}_ms": summary.mean_ms, f"median_{name}_ms": summary.median_ms}
        found[f"std_{name}_ms"] = summary.std_ms
        found |= {f"p{percent:g}_{name}_ms": value for percent, value in summary.percentiles.items()}
    return found if detailed else {key: value for key, value in found.items() if key not in DETAILS}

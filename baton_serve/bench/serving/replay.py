"""Replay a trace against a server, or against simulated instances, and print the report of `baton-bench serve`.

`baton-bench replay --trace conversation_trace.jsonl --base-url http://localhost:8000 --length-scale 0.05`

`baton-bench replay --trace conversation_trace.jsonl --simulate --card B60 --model Qwen3-4B --prefill 8 --decode 4`

Prompts are generated, but share prefixes exactly as the hashes of the trace do. Against a server, the replay takes as
long as the trace; the simulation of an hour takes seconds.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence

import httpx

from baton_serve.bench.report import Row, show
from baton_serve.bench.serving.load_client import BenchTarget, RequestOutcome, drive
from baton_serve.bench.serving.serve_report import measure
from baton_serve.bench.serving.serve_report import rows as served_rows
from baton_serve.bench.serving.traces import Trace, TraceError
from baton_serve.bench.serving.workload import trace_requests
from baton_serve.bench.simulation import options as shared
from baton_serve.bench.simulation.cost import CostError
from baton_serve.bench.simulation.run import simulate
from baton_serve.bench.simulation.summary import rows
from baton_serve.bench.simulation.summary import summarise as summarise_simulated

_HIT_COUNTERS = (
    ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
    ("baton:prefix_hit_tokens_total", "vllm:prompt_tokens_total"),
)
"""Counters in /metrics, in tokens: cache hits, and tokens looked up. The first pair is vLLM's, the second Baton's."""


def _range(text: str) -> tuple[int, int]:
    """Parse `LOW:HIGH` as a range of at least two token IDs. Raises `ValueError`."""
    low, _, high = text.partition(":")
    if int(low) < 0 or int(high) - int(low) < 2:
        raise ValueError(text)
    return int(low), int(high)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="baton-bench replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shared.add_trace(made, many=False)
    shared.add_objective(made)
    group = made.add_argument_group("server")
    group.add_argument("--base-url", default="http://127.0.0.1:8000", help="URL of the server")
    group.add_argument("--served-model-name", help="model name in requests (default: the first one of /v1/models)")
    group.add_argument("--api-key", help="API key for the server")
    group.add_argument(
        "--token-ids",
        type=_range,
        metavar="LOW:HIGH",
        help=(
            "send prompts of token IDs from this range, exactly as long as in the trace (default: text of "
            "about that length)"
        ),
    )
    group.add_argument(
        "--max-concurrency", type=int, help="most concurrent requests; others wait in the client (default: no limit)"
    )
    group.add_argument(
        "--no-ignore-eos", action="store_true", help="let answers end before the length given by the trace"
    )
    made.add_argument("--simulate", action="store_true", help="use simulated instances instead of a server")
    made.add_argument("--policy", choices=shared.POLICIES, default="prefix", help="placement policy, with --simulate")
    shared.add_pools(made)
    shared.add_cost(made)
    made.add_argument("--json", action="store_true", help="print one JSON object per row")
    return made


def run(arguments: Sequence[str]) -> None:
    made = parser()
    options = made.parse_args(arguments)
    if options.simulate and (wrong := shared.check_pools(options)) is not None:
        made.error(wrong)
    try:
        trace = shared.trace(options, options.time_scale)
        report = _simulated(options, trace) if options.simulate else _served(options, trace)
    except (CostError, TraceError) as exc:
        sys.exit(f"baton-bench replay: {exc}")
    scales = [("Time scale", trace.time_scale), ("Length scale", trace.length_scale)]
    if not options.json:
        print(trace.description())
    show([*(Row("replay", case, value, "x") for case, value in scales), *report], as_json=options.json)


def _simulated(options: argparse.Namespace, trace: Trace) -> list[Row]:
    cost = shared.cost(options)
    if not options.json:
        print(f"simulated: {cost.name}")
    pools = (options.prefill, options.decode)
    result = simulate(shared.scenario(options, trace, cost, policy=options.policy, pools=pools))
    return rows(summarise_simulated(result, shared.objective(options)))


def _served(options: argparse.Namespace, trace: Trace) -> list[Row]:
    target = BenchTarget(
        options.base_url,
        options.served_model_name,
        headers={"authorization": f"Bearer {options.api_key}"} if options.api_key else {},
        ignore_eos=not options.no_ignore_eos,
        max_concurrency=options.max_concurrency,
    )
    requests = trace_requests(trace, seed=options.seed, token_ids=options.token_ids)
    before = _counters(options.base_url)
    outcomes, duration_s = asyncio.run(drive(requests, target))
    objectives = {"ttft": options.goodput_ttft_ms, "tpot": options.goodput_tpot_ms}
    report = served_rows(measure(outcomes, duration_s, objectives=objectives), "replay")
    hit_rate = hit_rate_of(outcomes, before, _counters(options.base_url))
    return report if hit_rate is None else [*report, Row("replay", "Prefix token hit rate", hit_rate * 100, "%")]


def hit_rate_of(outcomes: Sequence[RequestOutcome], before: dict[str, float], after: dict[str, float]) -> float | None:
    """Return the cached fraction of all prompt tokens: from the usage of the answers, or else from the server's
    counters before and after. Return None if the server reports neither."""
    reporting = [outcome for outcome in outcomes if outcome.error is None and outcome.cached_tokens is not None]
    if reporting:
        return sum(outcome.cached_tokens or 0 for outcome in reporting) / max(
            1, sum(o.prompt_tokens for o in reporting)
        )
    for hits, queries in _HIT_COUNTERS:
        asked = after.get(queries, 0.0) - before.get(queries, 0.0)
        if hits in after and asked > 0:
            return (after[hits] - before.get(hits, 0.0)) / asked
    return None


def _counters(base_url: str) -> dict[str, float]:
    """Return the counters of /metrics by name, summed over labels; empty if the server has no such page."""
    try:
        answer = httpx.get(f"{base_url}/metrics", timeout=10)
    except httpx.HTTPError:
        return {}
    return parse_counters(answer.text) if answer.status_code == 200 else {}


def parse_counters(text: str) -> dict[str, float]:
    """Parse counters (names that end with `_total`) in the Prometheus text format and sum them over labels."""
    totals: dict[str, float] = {}
    for line in text.splitlines():
        name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
        if name.endswith("_total") and not line.startswith("#"):
            totals[name] = totals.get(name, 0.0) + float(rest.rpartition("}")[2].split()[0])
    return totals

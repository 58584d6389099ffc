"""Summarize a simulation: the report of `baton-bench serve`, and values that only a simulation has."""

from dataclasses import dataclass
from math import ceil

import msgspec

from baton_serve.bench.report import Row
from baton_serve.bench.simulation.measures import Distribution
from baton_serve.bench.simulation.run import Served, SimulationResult


@dataclass(frozen=True, slots=True)
class Objective:
    """Targets of a good request: its TTFT is at most `ttft_s`, its mean time per further token at most `tpot_s`, and
    99 % of its gaps are at most `itl_s`."""

    ttft_s: float = float("inf")
    tpot_s: float = float("inf")
    itl_s: float = float("inf")
    """This target is checked only if `Scenario.keeps_own_gaps` is set."""

    def is_met_by(self, served: Served) -> bool:
        return (
            served.ttft_s <= self.ttft_s
            and (served.tpot_s is None or served.tpot_s <= self.tpot_s)
            and (served.itl_p99_s is None or served.itl_p99_s <= self.itl_s)
        )

    def description(self) -> str:
        """Return the targets as one line for the output."""
        if self == Objective():
            return "no objective: every answered request counts as good"
        limits = (("TTFT", self.ttft_s), ("TPOT", self.tpot_s), ("p99 of its ITL", self.itl_s))
        parts = [f"{name} <= {value * 1e3:g} ms" for name, value in limits if value < float("inf")]
        return "objective: " + " and ".join(parts)


class Spread(msgspec.Struct, frozen=True):
    """Mean, median and 99th percentile of a distribution in milliseconds."""

    mean_ms: float
    median_ms: float
    p99_ms: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one simulation. Rates are per second of the run, until its last answer. Fractions lie in [0, 1]."""

    bench: str = "plan"
    trace: str
    time_scale: float
    length_scale: float
    spread_s: float
    cost: str
    policy: str
    seed: int
    prefill: int
    decode: int
    unified: int
    requests: int
    refused: int
    duration_s: float
    offered_per_s: float
    goodput_per_s: float
    attainment: float
    """Fraction of all requests that were good."""
    ttft_attainment: float
    output_tokens_per_s: float
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2el: Spread
    queue: Spread
    exposed_handoff: Spread
    ttft_prediction_error: Spread
    block_hit_rate: float
    """Cached fraction of the blocks of all prompts; a partial last block counts as one."""
    busy: dict[str, float]
    decisions: dict[str, int]
    mean_instances: dict[str, float] = {}
    """With autoscaling: mean number of instances by role, over time."""


def summarise(result: SimulationResult, objective: Objective) -> Summary:
    """Compute the summary of a simulation."""
    scenario, served = result.scenario, result.served
    num_requests = len(scenario.trace.requests)
    good = sum(objective.is_met_by(one) for one in served)
    blocks = sum(ceil(one.prompt_tokens / scenario.block_tokens) for one in served)
    decisions: dict[str, int] = {}
    for one in served:
        decisions[one.decision] = decisions.get(one.decision, 0) + 1
    return Summary(
        trace=scenario.trace.name,
        time_scale=scenario.trace.time_scale,
        length_scale=scenario.trace.length_scale,
        spread_s=scenario.trace.spread_s,
        cost=scenario.cost.name,
        policy="shared_cache" if scenario.shares_cache else scenario.policy,
        seed=scenario.seed,
        prefill=scenario.num_prefill,
        decode=scenario.num_decode,
        unified=scenario.num_unified,
        requests=num_requests,
        refused=len(result.refused),
        duration_s=result.duration_s,
        offered_per_s=num_requests / scenario.trace.duration_s if scenario.trace.duration_s else 0.0,
        goodput_per_s=good / result.duration_s,
        attainment=good / num_requests,
        ttft_attainment=sum(one.ttft_s <= objective.ttft_s for one in served) / num_requests,
        output_tokens_per_s=sum(one.output_tokens for one in served) / result.duration_s,
        ttft=_spread(Distribution(one.ttft_s for one in served)),
        tpot=_spread(Distribution(one.tpot_s for one in served if one.tpot_s is not None)),
        itl=_spread(result.gaps),
        e2el=_spread(Distribution(one.e2e_s for one in served)),
        queue=_spread(Distribution(one.queue_s for one in served)),
        exposed_handoff=_spread(Distribution(one.exposed_s for one in served if one.decision == "disaggregated")),
        ttft_prediction_error=_spread(Distribution(abs(one.ttft_s - one.predicted_ttft_s) for one in served)),
        block_hit_rate=sum(one.cached_tokens for one in served) / scenario.block_tokens / blocks if blocks else 0.0,
        busy=result.busy,
        decisions=dict(sorted(decisions.items())),
        mean_instances=_mean_instances(result),
    )


def rows(summary: Summary) -> list[Row]:
    """Return the rows of `baton-bench serve`'s report."""
    plain = [
        ("Successful requests", summary.requests - summary.refused, ""),
        ("Failed requests", summary.refused, ""),
        ("Benchmark duration", summary.duration_s, "s"),
        ("Request throughput", (summary.requests - summary.refused) / summary.duration_s, "req/s"),
        ("Request goodput", summary.goodput_per_s, "req/s"),
        ("Output token throughput", summary.output_tokens_per_s, "tok/s"),
        ("Prefix block hit rate", summary.block_hit_rate * 100, "%"),
    ]
    spreads = [("TTFT", summary.ttft), ("TPOT", summary.tpot), ("ITL", summary.itl), ("E2EL", summary.e2el)]
    times = [
        (f"{which} {name}", value, "ms")
        for name, spread in spreads
        for which, value in (("Mean", spread.mean_ms), ("Median", spread.median_ms), ("P99", spread.p99_ms))
    ]
    return [Row("replay", case, float(value), unit) for case, value, unit in [*plain, *times]]


HEADER = (
    "policy", "P", "D", "U", "time x", "req/s", "goodput/s", "good %", "TTFT mean", "p50", "p99", "TPOT p99",
    "ITL mean", "p99", "hit %", "busy P/D/U %", "refused",
)  # fmt: skip
"""Column titles of the table; times are in milliseconds."""


def cells(summary: Summary) -> tuple[str, ...]:
    """Return one row of the table."""
    busy = "/".join(f"{summary.busy[role] * 100:.0f}" if role in summary.busy else "-" for role in _ROLES)
    return (
        summary.policy,
        *(str(size) for size in (summary.prefill, summary.decode, summary.unified)),
        f"{summary.time_scale:g}",
        f"{summary.offered_per_s:.3g}",
        f"{summary.goodput_per_s:.3g}",
        f"{summary.attainment * 100:.1f}",
        *(_milliseconds(value) for value in (summary.ttft.mean_ms, summary.ttft.median_ms, summary.ttft.p99_ms)),
        _milliseconds(summary.tpot.p99_ms),
        _milliseconds(summary.itl.mean_ms),
        _milliseconds(summary.itl.p99_ms),
        f"{summary.block_hit_rate * 100:.1f}",
        busy,
        str(summary.refused),
    )


_ROLES = ("prefill", "decode", "unified")


def _milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _spread(values: Distribution) -> Spread:
    return Spread(values.mean * 1e3, values.percentile(50) * 1e3, values.percentile(99) * 1e3)


def _mean_instances(result: SimulationResult) -> dict[str, float]:
    """Return the time-weighted mean size of each pool, or nothing without autoscaling."""
    totals: dict[str, float] = {}
    if not result.sizes:
        return {}
    ends = [*(sizes.at_s for sizes in result.sizes[1:]), result.duration_s]
    for sizes, end in zip(result.sizes, ends, strict=True):
        for role, size in sizes.sizes.items():
            totals[role] = totals.get(role, 0.0) + size * (end - sizes.at_s)
    return {role: total / result.duration_s for role, total in totals.items()} if result.duration_s else {}

"""Predict how a cluster handles a trace before it exists: the router's own code with simulated instances, which use the
engine's own scheduler and block pool with a cost model instead of a device.

`baton-bench plan --trace conversation_trace.jsonl --card B60 --model Qwen3-4B --prefill 8 --decode 4`

Time is virtual, and the same command always prints the same result; an hour of a busy trace takes minutes. Not
simulated: the router's own time, steps launched ahead, answers that become the prefix of a later turn, and host tiers.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from baton_serve.bench import plots
from baton_serve.bench.serving.traces import Trace, TraceError
from baton_serve.bench.simulation import options as shared
from baton_serve.bench.simulation.autoscaling import PoolSizes, ScalingError, ScalingRules, rules_from_values
from baton_serve.bench.simulation.cost import CostError, CostModel
from baton_serve.bench.simulation.run import SimulationResult, simulate
from baton_serve.bench.simulation.search import Trials, best_split, smallest_pools
from baton_serve.bench.simulation.summary import HEADER, Summary, cells, summarise
from baton_serve.contracts.instance import Role


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="baton-bench plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shared.add_trace(made, many=True)
    shared.add_cost(made)
    shared.add_pools(made)
    shared.add_objective(made)
    group = made.add_argument_group("result")
    group.add_argument(
        "--policy",
        nargs="+",
        choices=shared.POLICIES,
        default=["prefix"],
        help="placement policies; several are compared",
    )
    group.add_argument(
        "--bound",
        action="store_true",
        help="also simulate shared_cache, a bound for any policy: all prefill instances share one cache of their total "
        "size, and each prompt goes to the shortest queue",
    )
    group.add_argument(
        "--search",
        action="store_true",
        help=("find the smallest pools that meet the targets; with --instances, the split with the most goodput"),
    )
    group.add_argument("--instances", type=int, help="with --search: total number of prefill and decode instances")
    group.add_argument(
        "--attainment", type=float, default=0.9, help="with --search: fraction of requests that must be good"
    )
    group.add_argument("--most", type=int, default=64, help="with --search: largest pool to try")
    group.add_argument("--autoscale", action="store_true", help="simulate the chart's autoscaling of the pools")
    group.add_argument(
        "--values", type=Path, help="with --autoscale: values file of the chart (default: the chart's defaults)"
    )
    group.add_argument(
        "--start-s", type=float, default=60.0, help="with --autoscale: seconds until a new instance is ready"
    )
    group.add_argument("--plot", type=Path, help="PNG file for the results (needs matplotlib: the extra `bench`)")
    made.add_argument("--json", action="store_true", help="print one JSON object per case")
    return made


def run(arguments: Sequence[str]) -> None:
    made = parser()
    options = made.parse_args(arguments)
    if (wrong := _wrong(options)) is not None:
        made.error(wrong)
    try:
        if options.plot is not None:
            plots.check()
        cost = shared.cost(options)
        scaling = _scaling(options)
        traces = [shared.trace(options, scale) for scale in options.time_scale]
    except (CostError, TraceError, ScalingError, plots.PlotError) as exc:
        sys.exit(f"baton-bench plan: {exc}")
    if not options.json:
        _show_setting(options, cost, traces)
    if options.search:
        _search(options, cost, traces[0])
    else:
        _compare(options, cost, traces, scaling)


def _wrong(options: argparse.Namespace) -> str | None:
    """Return an error message if the options contradict each other, or else None."""
    if options.search:
        if options.unified or options.prefill or options.decode:
            return "--search finds the pools: leave out --prefill, --decode and --unified"
        if len(options.policy) > 1 or len(options.time_scale) > 1:
            return "--search takes one --policy and one --time-scale"
        if options.autoscale or options.bound:
            return "--search excludes --autoscale and --bound"
        if options.instances is not None and options.instances < 2:
            return "--instances must be at least 2: one prefill, one decode"
        return None
    if options.autoscale and (len(options.policy) > 1 or len(options.time_scale) > 1):
        return "--autoscale takes one --policy and one --time-scale"
    return shared.check_pools(options)


def _scaling(options: argparse.Namespace) -> ScalingRules | None:
    if not options.autoscale:
        return None
    sizes: dict[Role, int] = {"prefill": options.prefill, "decode": options.decode, "unified": options.unified}
    return rules_from_values(options.values, start_s=options.start_s, roles=[r for r, size in sizes.items() if size])


def _compare(
    options: argparse.Namespace, cost: CostModel, traces: Sequence[Trace], scaling: ScalingRules | None
) -> None:
    results: list[SimulationResult] = []
    summaries: list[Summary] = []
    for trace in traces:
        for policy in options.policy:
            pools = (options.prefill, options.decode)
            scenario = shared.scenario(options, trace, cost, policy=policy, pools=pools, scaling=scaling)
            results.append(simulate(scenario))
            summaries.append(summarise(results[-1], shared.objective(options)))
            _progress(summaries[-1])
        if options.bound:
            pools = (options.prefill, options.decode)
            scenario = shared.scenario(options, trace, cost, policy="least_loaded", pools=pools)
            results.append(simulate(replace(scenario, shares_cache=True)))
            summaries.append(summarise(results[-1], shared.objective(options)))
            _progress(summaries[-1])
    _show(options, summaries)
    if scaling is not None and not options.json:
        _show_sizes(results[0].sizes)
    if options.plot is not None:
        plots.compare(options.plot, results, summaries)


def _search(options: argparse.Namespace, cost: CostModel, trace: Trace) -> None:
    def trial(prefill: int, decode: int) -> Summary:
        scenario = shared.scenario(options, trace, cost, policy=options.policy[0], pools=(prefill, decode))
        summary = summarise(simulate(scenario), shared.objective(options))
        _progress(summary)
        return summary

    trials = Trials(trial)
    if options.instances is not None:
        found: Summary | None = best_split(trials, options.instances)
    else:
        found = smallest_pools(trials, attainment=options.attainment, most=options.most)
    tried = sorted(trials.all, key=lambda summary: (summary.prefill, summary.decode))
    _show(options, tried)
    if not options.json:
        _show_found(options, found)
    if options.plot is not None:
        plots.search(options.plot, tried, found)
    if found is None:
        sys.exit(
            f"baton-bench plan: {options.most} prefill and {options.most} decode instances do not meet the targets"
        )


def _show_setting(options: argparse.Namespace, cost: CostModel, traces: Sequence[Trace]) -> None:
    for trace in traces:
        print(trace.description())
    print(
        f"{cost.name}: prefill {cost.prefill_tokens_per_s:,.0f} tok/s, decode step {cost.step_s(1, 0) * 1e3:.1f} ms + "
        f"{cost.step_s_per_kv_token * 1e9:.0f} ns per KV token, {cost.kv_tokens:,} tokens of KV cache, "
        f"link {cost.link_bytes_per_s / 1e9:g} GB/s"
    )
    print(f"{shared.objective(options).description()}; times in ms\n")


def _show(options: argparse.Namespace, summaries: Sequence[Summary]) -> None:
    if options.json:
        for summary in summaries:
            print(msgspec.json.encode(summary).decode())
        return
    lines = [HEADER, *(cells(summary) for summary in summaries)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _show_found(options: argparse.Namespace, found: Summary | None) -> None:
    if found is not None:
        print(
            f"\n{found.prefill} prefill : {found.decode} decode, {found.attainment * 100:.1f} % of requests good, "
            f"{found.goodput_per_s:.3g} good requests/s"
        )


def _show_sizes(sizes: Sequence[PoolSizes]) -> None:
    print("\nafter s  instances")
    for one in sizes:
        print(f"{one.at_s:7,.0f}  " + ", ".join(f"{role} {size}" for role, size in one.sizes.items()))


def _progress(summary: Summary) -> None:
    sys.stderr.write(
        f"{summary.policy} {summary.prefill}:{summary.decode} x {summary.time_scale:g}: "
        f"TTFT {summary.ttft.mean_ms:,.0f} ms, goodput {summary.goodput_per_s:.3g}/s\n"
    )

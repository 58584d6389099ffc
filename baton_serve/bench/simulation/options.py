"""Command-line options that `baton-bench plan` and `baton-bench replay --simulate` share, and the objects made from
them.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import get_args

from baton_serve.bench.serving.traces import Trace, load_trace
from baton_serve.bench.simulation.autoscaling import ScalingRules
from baton_serve.bench.simulation.cost import (
    CostModel,
    adjusted,
    card_named,
    from_card,
    from_measurements,
    model_named,
    prompt_steps,
)
from baton_serve.bench.simulation.run import Scenario
from baton_serve.bench.simulation.summary import Objective
from baton_serve.services.router.placement.policy import PolicyName
from baton_serve.services.router.placement.prefix_pull import PullPolicy

DEFAULT_BLOCK_TOKENS = 64
"""Block size if the trace has no hashes."""
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


def add_trace(made: argparse.ArgumentParser, *, many: bool) -> None:
    """Add the options of the trace; with `many`, several time scales."""
    group = made.add_argument_group("trace")
    group.add_argument("--trace", type=Path, required=True, help="trace file: Mooncake's .jsonl or Azure's .csv")
    group.add_argument(
        "--time-scale",
        type=float,
        default=[1.0] if many else 1.0,
        nargs="+" if many else None,
        help="factor for the times of the trace; 0.5 doubles the load"
        + ("; several values are compared" if many else ""),
    )
    group.add_argument("--length-scale", type=float, default=1.0, help="factor for the lengths of the trace")
    group.add_argument(
        "--spread-s",
        type=float,
        default=0.0,
        help=(
            "delay each request by a random time up to this many seconds, the same in every run; Mooncake's "
            "times are rounded to 3 s"
        ),
    )
    group.add_argument("--num-prompts", type=int, help="use only this number of requests from the start (default: all)")


def add_cost(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("cost model of simulated instances")
    group.add_argument(
        "--card", default="B60", help="B580, A770, B60 or B70: rates from data sheets (docs/reference/sizing.md)"
    )
    group.add_argument("--model", default="Qwen2.5-7B", help="a model of docs/reference/sizing.md")
    group.add_argument(
        "--measured", type=Path, help="use rates from this output of `baton-bench engine --json` for the model instead"
    )
    group.add_argument(
        "--kv-cache-tokens", type=int, help="KV cache of an instance in tokens (required with --measured)"
    )
    group.add_argument("--prefill-tokens-per-s", type=float, help="another prefill rate, the same for every length")
    group.add_argument(
        "--prompt-steps",
        type=Path,
        help='JSON file with durations of steps with prompts in ms: {"alone": {"256": 6.1, …}, "beside": …}',
    )
    group.add_argument(
        "--link-gbps", type=float, default=10.0, help="bandwidth of an instance in each direction in GB/s"
    )
    group.add_argument("--max-num-seqs", type=int, default=256, help="most sequences in one step of an instance")
    group.add_argument(
        "--max-num-batched-tokens", type=int, default=2048, help="most tokens in one step of an instance"
    )
    group.add_argument("--block-size", type=int, help="tokens per block (default: tokens per hash of the trace, or 64)")
    group.add_argument("--disaggregation-min-tokens", type=int, default=32, help="as the flag of the router")
    group.add_argument("--itl-ms", type=float, help="ITL SLO of every request in ms, as the header x-baton-itl-ms")
    group.add_argument("--ttft-ms", type=float, help="TTFT SLO of every request in ms, as the header x-baton-ttft-ms")
    group.add_argument("--kv-pull", choices=get_args(PullPolicy), default="auto", help="as the flag of the router")
    group.add_argument(
        "--dispatch-ahead-s",
        type=float,
        default=1.0,
        help="as the flag of the router; inf: no request waits in the router",
    )
    group.add_argument(
        "--seed", type=int, default=0, help="first instance of policies that choose instances in rotation"
    )


def add_pools(made: argparse.ArgumentParser) -> None:
    """Add the options for the sizes of the pools."""
    group = made.add_argument_group("pools")
    group.add_argument("--prefill", type=int, default=0, help="number of prefill instances")
    group.add_argument("--decode", type=int, default=0, help="number of decode instances")
    group.add_argument("--unified", type=int, default=0, help="number of instances that do both")


def add_objective(made: argparse.ArgumentParser) -> None:
    """Add the options that define a good request."""
    group = made.add_argument_group("objective")
    group.add_argument(
        "--goodput-ttft-ms", type=float, default=float("inf"), help="TTFT target of a good request in ms"
    )
    group.add_argument(
        "--goodput-tpot-ms", type=float, default=float("inf"), help="TPOT target of a good request in ms"
    )
    group.add_argument(
        "--goodput-itl-ms",
        type=float,
        default=float("inf"),
        help="target for the 99th percentile of a good request's own ITL, in ms",
    )


def objective(options: argparse.Namespace) -> Objective:
    return Objective(options.goodput_ttft_ms / 1e3, options.goodput_tpot_ms / 1e3, options.goodput_itl_ms / 1e3)


def trace(options: argparse.Namespace, time_scale: float) -> Trace:
    """Read the trace of the options. Raises `TraceError`."""
    return load_trace(
        options.trace,
        count=options.num_prompts,
        length_scale=options.length_scale,
        time_scale=time_scale,
        spread_s=options.spread_s,
    )


def cost(options: argparse.Namespace) -> CostModel:
    """Build the cost model of the options. Raises `CostError`."""
    model = model_named(options.model)
    made = (
        from_card(card_named(options.card), model)
        if options.measured is None
        else from_measurements(options.measured, model)
    )
    if options.prompt_steps is not None:
        made = replace(made, prompt_steps=prompt_steps(options.prompt_steps))
    return adjusted(
        made,
        prefill_tokens_per_s=options.prefill_tokens_per_s,
        kv_tokens=options.kv_cache_tokens,
        link_bytes_per_s=options.link_gbps * 1e9,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )


def scenario(
    options: argparse.Namespace,
    trace: Trace,
    cost: CostModel,
    *,
    policy: PolicyName,
    pools: tuple[int, int],
    scaling: ScalingRules | None = None,
) -> Scenario:
    """Return the scenario of one simulation. `pools` is the number of prefill and decode instances; `options.unified`
    instances are added."""
    return Scenario(
        trace=trace,
        cost=cost,
        num_prefill=pools[0],
        num_decode=pools[1],
        num_unified=options.unified,
        policy=policy,
        block_tokens=options.block_size or trace.hash_tokens or DEFAULT_BLOCK_TOKENS,
        disaggregation_min_tokens=options.disaggregation_min_tokens,
        pull=options.kv_pull,
        itl_s=None if options.itl_ms is None else options.itl_ms / 1e3,
        ttft_s=None if options.ttft_ms is None else options.ttft_ms / 1e3,
        dispatch_ahead_s=options.dispatch_ahead_s,
        seed=options.seed,
        scaling=scaling,
        keeps_own_gaps=options.goodput_itl_ms < float("inf"),
    )


def check_pools(options: argparse.Namespace) -> str | None:
    """Return an error message if the sizes of the pools are invalid, or else None."""
    if min(options.prefill, options.decode, options.unified) < 0:
        return "a pool cannot have fewer than 0 instances"
    if not options.decode and not options.unified:
        return "no instance could generate tokens: give --decode (and --prefill) or --unified"
    return None

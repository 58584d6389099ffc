"""Options that `baton-bench plan` and `baton-bench replay --simulate` share, and what they make."""

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
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


def add_trace(made: argparse.ArgumentParser, *, many: bool) -> None:
    group = made.add_argument_group("trace")
    group.add_argument("--trace", type=Path, required=True, help="a Mooncake .jsonl or an Azure .csv")
    group.add_argument(
        "--time-scale",
        type=float,
        default=[1.0] if many else 1.0,
        nargs="+" if many else None,
        help="multiplies the trace's times: 0.5 is twice the load" + ("; several are compared" if many else ""),
    )
    group.add_argument("--length-scale", type=float, default=1.0, help="multiplies the trace's lengths")
    group.add_argument(
        "--spread-s",
        type=float,
        default=0.0,
        help="each request comes up to so much later, always the same: Mooncake's times are rounded to 3 s",
    )
    group.add_argument("--num-prompts", type=int, help="only so many requests from the start")


def add_cost(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("what simulated instances cost")
    group.add_argument(
        "--card", default="B60", help="B580, A770, B60 or B70: data sheet rates (docs/reference/sizing.md)"
    )
    group.add_argument("--model", default="Qwen2.5-7B", help="as in docs/reference/sizing.md")
    group.add_argument("--measured", type=Path, help="rates from `baton-bench engine --json` of the model instead")
    group.add_argument("--kv-cache-tokens", type=int, help="tokens of KV cache of an instance (needed with --measured)")
    group.add_argument("--prefill-tokens-per-s", type=float, help="another speed of prefill, the same at every length")
    group.add_argument(
        "--prompt-steps", type=Path, help='times of steps with prompts: {"alone": {"256": 6.1, …}, "beside": …}, ms'
    )
    group.add_argument("--link-gbps", type=float, default=10.0, help="GB/s of an instance in each direction")
    group.add_argument("--max-num-seqs", type=int, default=256)
    group.add_argument("--max-num-batched-tokens", type=int, default=2048)
    group.add_argument("--block-size", type=int, help="default: the tokens of a hash of the trace, or 64")
    group.add_argument("--disaggregation-min-tokens", type=int, default=32)
    group.add_argument("--itl-ms", type=float, help="promised to every request, as by x-baton-itl-ms")
    group.add_argument("--ttft-ms", type=float, help="likewise, as by x-baton-ttft-ms")
    group.add_argument("--kv-pull", choices=get_args(PullPolicy), default="auto", help="as the router's")
    group.add_argument("--dispatch-ahead-s", type=float, default=1.0, help="as the router's; inf: nothing waits in it")
    group.add_argument("--seed", type=int, default=0, help="where policies that take turns begin")


def add_pools(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("pools")
    group.add_argument("--prefill", type=int, default=0, help="prefill instances")
    group.add_argument("--decode", type=int, default=0, help="decode instances")
    group.add_argument("--unified", type=int, default=0, help="instances that do both")


def add_objective(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("objective")
    group.add_argument("--goodput-ttft-ms", type=float, default=float("inf"))
    group.add_argument("--goodput-tpot-ms", type=float, default=float("inf"))
    group.add_argument(
        "--goodput-itl-ms", type=float, default=float("inf"), help="of the 99th percentile of each request's own gaps"
    )


def objective(options: argparse.Namespace) -> Objective:
    return Objective(options.goodput_ttft_ms / 1e3, options.goodput_tpot_ms / 1e3, options.goodput_itl_ms / 1e3)


def trace(options: argparse.Namespace, time_scale: float) -> Trace:
    """Raises `TraceError`."""
    return load_trace(
        options.trace,
        count=options.num_prompts,
        length_scale=options.length_scale,
        time_scale=time_scale,
        spread_s=options.spread_s,
    )


def cost(options: argparse.Namespace) -> CostModel:
    """Raises `CostError`."""
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
    """`pools`: prefill and decode instances; `options.unified` come on top."""
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
    """What is wrong with the pools' sizes."""
    if min(options.prefill, options.decode, options.unified) < 0:
        return "a pool cannot have fewer than 0 instances"
    if not options.decode and not options.unified:
        return "nobody could write an answer: give --decode (and --prefill) or --unified"
    return None

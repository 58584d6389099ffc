"""Compare one prefill and one decode instance with two unified ones: same devices, engine, trace and load.

`baton-bench pd MODEL --trace FILE [--rates 10 20] [--duration-s 30] [--chunks 512 1024] [--plot FILE.png] [--json]`

`baton serve` starts each setup, one after another. Each receives the first requests of the trace, with times scaled to
each rate; prompts are token IDs of exact length. With `--slos-ms 0 12` each rate is sent twice, the second time
with an ITL SLO of 12 ms (`x-baton-itl-ms`). With an SLO the router may hold back first tokens, and decode instances
may compute prompts as far as the SLO allows. `12/1000` also sets a TTFT SLO of 1000 ms.

A request is good if its TTFT and the 99th percentile of its own inter-token latencies meet the targets; goodput is
good requests per second of arrivals. The curve shows, for each ITL target, the best goodput of each layout over its
setups and rates. A text below it lists where separate prefill and decode are worse. The plot has one line per setup.
`--from FILE ...` reads the output of earlier runs with `--json` and runs nothing. Without a model, `--shape NAME`
serves random weights with a generated vocabulary.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import httpx

from baton_serve.bench import plots
from baton_serve.bench.micro.engine_shapes import SHAPES
from baton_serve.bench.report import Row, show
from baton_serve.bench.router.senders import LoadTarget, send_all
from baton_serve.bench.serving.pd_results import (
    APART,
    OBJECTIVES_MS,
    UNIFIED,
    Measured,
    PdSetup,
    curve,
    line_of,
    lines,
    losses,
    read_runs,
)
from baton_serve.bench.serving.peers import Server, running, wait_complete
from baton_serve.bench.serving.servable_shape import write_servable_shape
from baton_serve.bench.serving.traces import TraceError, load_trace
from baton_serve.bench.serving.workload import trace_requests
from baton_serve.child_command import module_command


class SloTargets(NamedTuple):
    """SLOs of every request in ms, 0 for none: inter-token latency and time to first token."""

    itl_ms: float
    ttft_ms: float = 0.0


def parse_slo_targets(text: str) -> SloTargets:
    """Parse `ITL` or `ITL/TTFT` in ms, such as `12` or `12/1000`. Raises `ValueError` for any other text."""
    itl_ms, _, ttft_ms = text.partition("/")
    return SloTargets(float(itl_ms), float(ttft_ms or 0))


def setups(options: argparse.Namespace) -> list[PdSetup]:
    """Return the setups to measure: those with separate prefill first."""
    apart = ("--prefill", "1", "--decode", "1")
    unified = ("--prefill", "0", "--decode", "0", "--unified", "2")
    return [
        *(PdSetup(APART, chunk, (*apart, *options.pd_args)) for chunk in options.pd_chunks),
        *(PdSetup(UNIFIED, chunk, unified) for chunk in options.chunks),
    ]


def measure(options: argparse.Namespace, model: str) -> Iterator[Measured]:
    """Start each setup and measure all rates. A setup that does not start, or does not fit in the time budget, is
    reported on stderr and skipped."""
    begun, longest_s = time.monotonic(), 0.0
    for setup in setups(options):
        setup_begun = time.monotonic()
        if setup_begun - begun + longest_s > options.budget_s:
            sys.stderr.write(
                f"{setup.name}: skipped, it may take longer than what is left of --budget-s {options.budget_s:g}\n"
            )
            continue
        serve = module_command("baton_serve", "serve", model, "--port", "{port}")
        flags = ["--max-num-batched-tokens", str(setup.chunk), *setup.flags, *options.baton_args]
        try:
            with running(Server(setup.name, [*serve, *flags])) as url:
                wait_complete(url, 2)
                yield from _measure_rates(options, setup, url)
        except SystemExit as exc:
            # `running` raises `SystemExit` if a server does not start. The other setups are still worth measuring.
            sys.stderr.write(f"{setup.name}: {exc}\n")
        longest_s = max(longest_s, time.monotonic() - setup_begun)


def _measure_rates(options: argparse.Namespace, setup: PdSetup, url: str) -> Iterator[Measured]:
    model = httpx.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"]
    cases = [(rate, targets) for rate in options.rates for targets in options.slos_ms]
    for number, (rate, targets) in enumerate([(options.rates[0], max(options.slos_ms)), *cases]):
        is_warm_up = number == 0
        with_slo = replace(setup, itl_ms=targets.itl_ms, ttft_ms=targets.ttft_ms)
        target = LoadTarget(url, model, options.request_timeout_s, targets.itl_ms, targets.ttft_ms)
        duration_s = min(options.warm_up_s, options.duration_s) if is_warm_up else options.duration_s
        count = max(2, round(rate * duration_s))
        # Scale the times of the trace so that its first `count` requests take `duration_s`.
        natural = load_trace(options.trace, count=count, length_scale=options.length_scale)
        scale = duration_s / natural.duration_s
        trace = load_trace(options.trace, count=count, length_scale=options.length_scale, time_scale=scale)
        requests = trace_requests(trace, seed=number, token_ids=(options.token_ids[0], options.token_ids[1]))
        before = _prompts_of_decode(url)
        outcomes = send_all(requests, target, processes=options.clients)
        if is_warm_up or not any(outcome.error is None for outcome in outcomes):
            if not is_warm_up:
                sys.stderr.write(f"{with_slo.name} at {rate:g}/s: no request succeeded: {outcomes[0].error}\n")
            continue
        measured = Measured(with_slo, rate, trace.duration_s, outcomes)
        _report_run(measured, options, _prompts_of_decode(url) - before)
        yield measured


def _prompts_of_decode(url: str) -> int:
    """Return the number of prompts that decode instances have computed so far, from the router's counters."""
    text = httpx.get(f"{url}/metrics", timeout=10).text
    lines = [line for line in text.splitlines() if line.startswith("baton:placements_total") and "decode_only" in line]
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines))


def _report_run(measured: Measured, options: argparse.Namespace, num_prompts_of_decode: int) -> None:
    good = measured.goodput(options.goodput_ttft_ms / 1e3, options.goodput_itl_ms / 1e3)
    causes = measured.causes(options.goodput_ttft_ms / 1e3, options.goodput_itl_ms / 1e3)
    first = [measured.first_gap_s(percent) * 1e3 for percent in (50, 99)]
    sys.stderr.write(
        f"{measured.setup.name} at {measured.rate:g}/s: goodput {good:.3g}/s, mean TTFT"
        f" {measured.mean_ttft_s * 1e3:.4g} ms (held {measured.mean_held_s * 1e3:.3g}), p99 ITL"
        f" {measured.itl_s(99) * 1e3:.4g} ms, first gap median {first[0]:.3g}, p99 {first[1]:.3g} ms; of"
        f" {len(measured.outcomes)} requests {causes.failed} failed, not good by the first token"
        f" {causes.first_token}, first gap {causes.first_gap}, later gaps {causes.later_gaps}; {num_prompts_of_decode}"
        " prompts computed by decode\n"
    )
    sys.stderr.flush()


def rows_of(found: Sequence[Measured], options: argparse.Namespace) -> Iterator[Row]:
    """Yield goodput, TTFT and ITL of each setup and rate, then the best of both layouts side by side, and the curve."""
    ttft_s, itl_s = options.goodput_ttft_ms / 1e3, options.goodput_itl_ms / 1e3
    for measured in found:
        case = f"{measured.setup.name}, {measured.rate:g}/s"
        yield Row("pd", f"{case}: goodput", measured.goodput(ttft_s, itl_s), "req/s")
        yield Row("pd", f"{case}: mean TTFT", measured.mean_ttft_s * 1e3, "ms")
        yield Row("pd", f"{case}: median ITL", measured.itl_s(50) * 1e3, "ms")
        yield Row("pd", f"{case}: p99 ITL", measured.itl_s(99) * 1e3, "ms")
        yield Row("pd", f"{case}: median first gap", measured.first_gap_s(50) * 1e3, "ms")
        yield Row("pd", f"{case}: p99 first gap", measured.first_gap_s(99) * 1e3, "ms")
        yield Row("pd", f"{case}: first tokens held, mean", measured.mean_held_s * 1e3, "ms")
        causes = measured.causes(ttft_s, itl_s)
        yield Row("pd", f"{case}: failed", float(causes.failed), "")
        yield Row("pd", f"{case}: not good by the first token", float(causes.first_token), "")
        yield Row("pd", f"{case}: not good by the first gap alone", float(causes.first_gap), "")
        yield Row("pd", f"{case}: not good by later gaps", float(causes.later_gaps), "")
    for rate in dict.fromkeys(measured.rate for measured in found):
        yield from _beside(rate, [measured for measured in found if measured.rate == rate], ttft_s, itl_s)
    for objective, values in curve(found, ttft_s).items():
        apart, unified = values
        label = f"best goodput, TTFT <= {options.goodput_ttft_ms:g} ms, p99 ITL <= {objective} ms: {APART}"
        ratio = apart / unified if unified else None
        yield Row("pd", label, apart, "req/s", ratio=ratio, peer=UNIFIED, peer_value=unified)


def _beside(rate: float, found: Sequence[Measured], ttft_s: float, itl_s: float) -> Iterator[Row]:
    """Compare the layouts' setups of best goodput at one rate. A `ratio` above 1 means that separate prefill is
    better."""
    best = {
        layout: max(
            (measured for measured in found if measured.setup.layout == layout),
            key=lambda measured: (measured.goodput(ttft_s, itl_s), -measured.itl_s(99)),
            default=None,
        )
        for layout in (APART, UNIFIED)
    }
    apart, unified = best[APART], best[UNIFIED]
    if apart is None or unified is None:
        return
    pairs = (
        ("p99 ITL", apart.itl_s(99), unified.itl_s(99)),
        ("mean TTFT", apart.mean_ttft_s, unified.mean_ttft_s),
    )
    for what, ours, theirs in pairs:
        ratio = theirs / ours if ours else None
        yield Row("pd", f"{rate:g}/s: {what} of {APART}", ours * 1e3, "ms", None, ratio, UNIFIED, theirs * 1e3)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="baton-bench pd", description=__doc__)
    made.add_argument("model", nargs="?", help="folder of a model (default: random weights of --shape)")
    made.add_argument(
        "--shape",
        choices=sorted(SHAPES),
        default="llama-3.1-8b",
        help="shape of the random weights if no model is given",
    )
    made.add_argument("--trace", type=Path, help="trace file: Azure's .csv or Mooncake's .jsonl")
    made.add_argument(
        "--from",
        dest="earlier",
        type=Path,
        nargs="+",
        help="outputs of earlier runs with --json to report again; nothing is run",
    )
    made.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[10.0, 20.0, 30.0],
        help="request rates to measure, in requests per second",
    )
    made.add_argument("--duration-s", type=float, default=30.0, help="seconds of arrivals at each rate")
    made.add_argument("--warm-up-s", type=float, default=5.0, help="seconds of load at the first rate before measuring")
    made.add_argument("--length-scale", type=float, default=1.0, help="factor for the lengths of the trace")
    made.add_argument(
        "--chunks",
        type=int,
        nargs="*",
        default=[512, 1024, 2048],
        help="--max-num-batched-tokens of the unified setups; none: measure only 1P1D",
    )
    made.add_argument(
        "--pd-chunks",
        type=int,
        nargs="*",
        default=[1024],
        help="--max-num-batched-tokens of the setups with separate prefill",
    )
    made.add_argument(
        "--slos-ms",
        "--promises-ms",
        type=parse_slo_targets,
        nargs="+",
        default=[SloTargets(0.0)],
        help=(
            "ITL SLOs of every request in ms, each measured at each rate; 12/1000 adds a TTFT SLO of 1000 ms; 0: no SLO"
        ),
    )
    made.add_argument("--goodput-ttft-ms", type=float, default=1000.0, help="TTFT target of a good request in ms")
    made.add_argument(
        "--goodput-itl-ms",
        type=float,
        default=12.0,
        help="target for the 99th percentile of a good request's own ITL, in ms",
    )
    made.add_argument(
        "--budget-s", type=float, default=480.0, help="time budget in seconds; a setup that would exceed it is skipped"
    )
    made.add_argument("--clients", type=int, default=8, help="number of client processes that send and measure")
    made.add_argument(
        "--request-timeout-s", type=float, default=120.0, help="seconds after which a request counts as failed"
    )
    made.add_argument(
        "--token-ids", type=int, nargs=2, default=[1000, 30000], help="range of token IDs for the prompts"
    )
    made.add_argument(
        "--baton-args", type=str.split, default=[], help="more flags of `baton serve` for all setups, as one string"
    )
    made.add_argument(
        "--pd-args",
        type=str.split,
        default=[],
        help="more flags of `baton serve` for the setups with separate prefill, as one string",
    )
    made.add_argument("--plot", type=Path, help="PNG file for the curve (needs matplotlib)")
    made.add_argument("--json", action="store_true", help="print one JSON object per row, and each run for --from")
    return made


def run(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    if options.plot is not None:
        try:
            plots.check()
        except plots.PlotError as exc:
            raise SystemExit(f"baton-bench pd: {exc}") from None
    found: list[Measured] = []
    for measured in _earlier(options) if options.earlier else _measured(options):
        found.append(measured)
        if options.json:
            sys.stdout.write(line_of(measured) + "\n")
            sys.stdout.flush()
    show(rows_of(found, options), as_json=options.json)
    ttft_s = options.goodput_ttft_ms / 1e3
    # JSON output must stay one object per line on stdout; programs find the same values in the rows.
    out = sys.stderr if options.json else sys.stdout
    lost = list(losses(found, ttft_s)) or ["nowhere in these measurements"]
    out.write(f"\nwhere {APART} is worse than {UNIFIED}:\n" + "".join(f"  {text}\n" for text in lost))
    if options.plot is not None:
        plots.objectives(options.plot, OBJECTIVES_MS, lines(found, ttft_s), ttft_ms=options.goodput_ttft_ms)


def _earlier(options: argparse.Namespace) -> list[Measured]:
    try:
        return read_runs(options.earlier)
    except (OSError, ValueError) as exc:
        raise SystemExit(f"baton-bench pd: {exc}") from None


def _measured(options: argparse.Namespace) -> Iterator[Measured]:
    if options.trace is None:
        raise SystemExit("baton-bench pd: give --trace FILE, or --from FILES with earlier results")
    try:
        # Check the file before any server is started.
        load_trace(options.trace, count=2)
    except TraceError as exc:
        raise SystemExit(f"baton-bench pd: {exc}") from None
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if model is None:
            model = str(write_servable_shape(options.shape, Path(folder)))
            options.baton_args = ["--load-format", "dummy", *options.baton_args]
        yield from measure(options, model)

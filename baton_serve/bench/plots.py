"""Draw results of `baton-bench plan`, `pd` and `kv` as PNG. matplotlib is imported only when a plot is requested."""

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baton_serve.bench.simulation.run import SimulationResult
from baton_serve.bench.simulation.summary import Summary
from baton_serve.bench.transfer.results import Point


class PlotError(Exception):
    """matplotlib is not installed."""


def check() -> None:
    """Raise `PlotError` if matplotlib is missing. Call it before a long simulation, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError("--plot needs matplotlib: pip install 'baton-serve[bench]'")


def compare(path: Path, results: Sequence[SimulationResult], summaries: Sequence[Summary]) -> None:
    """Draw the distribution of TTFT; with several loads also TTFT over load, with autoscaling also pool sizes over
    time."""
    scales = {summary.time_scale for summary in summaries}
    sizes = [result for result in results if result.sizes]
    figure, axes = _figure(1 + (len(scales) > 1) + bool(sizes))
    for result, summary in zip(results, summaries, strict=True):
        values = sorted(served.ttft_s for served in result.served)
        fractions = [(number + 1) / len(values) for number in range(len(values))]
        axes[0].plot(values, fractions, label=_label(summary, scales))
    axes[0].set(xlabel="time to first token, s", ylabel="fraction of requests", xscale="log", title="TTFT")
    axes[0].legend()
    if len(scales) > 1:
        for policy in dict.fromkeys(summary.policy for summary in summaries):
            points = sorted((s.offered_per_s, s.ttft.mean_ms / 1e3) for s in summaries if s.policy == policy)
            axes[1].plot(*zip(*points, strict=True), marker="o", label=policy)
        axes[1].set(xlabel="requests/s", ylabel="mean TTFT, s", yscale="log", title="load")
        axes[1].legend()
    if sizes:
        _draw_sizes(axes[-1], sizes[0])
    figure.savefig(path, dpi=120)


def search(path: Path, tried: Sequence[Summary], found: Summary | None) -> None:
    """Draw every trial as a point, colored by its fraction of good requests; the result has a red circle."""
    figure, [axis] = _figure(1)
    points = axis.scatter(
        [summary.prefill for summary in tried],
        [summary.decode for summary in tried],
        c=[summary.attainment * 100 for summary in tried],
        cmap="viridis",
    )
    figure.colorbar(points, label="good requests, %")
    if found is not None:
        axis.scatter([found.prefill], [found.decode], s=160, facecolors="none", edgecolors="red")
    axis.set(xlabel="prefill instances", ylabel="decode instances", title="objective met")
    figure.savefig(path, dpi=120)


def objectives(
    path: Path, objectives_ms: Sequence[int], lines: Mapping[str, Sequence[float]], *, ttft_ms: float
) -> None:
    """Draw goodput over the ITL target, one line per setup. All setups of one layout share a line style."""
    figure, [axis] = _figure(1)
    figure.set_size_inches(10, 5)  # the legend with the setups' names stands to the right
    kinds = dict(zip(dict.fromkeys(label.partition(",")[0] for label in lines), ("-", "--", ":", "-."), strict=False))
    for number, (label, values) in enumerate(lines.items()):
        kind = kinds.get(label.partition(",")[0], "-")
        axis.plot(
            objectives_ms,
            values,
            kind,
            marker="o",
            markersize=4,
            color=f"C{number}" if number < 10 else "black",
            label=label,
        )
    title = f"best goodput, TTFT <= {ttft_ms:g} ms"
    axis.set(xlabel="p99 gap between tokens, ms", ylabel="good requests/s", xscale="log", title=title)
    axis.minorticks_off()
    axis.set_xticks(objectives_ms, [str(at) for at in objectives_ms], fontsize="small")
    axis.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), fontsize="small")
    figure.savefig(path, dpi=120)


def transfers(path: Path, points: Sequence[Point]) -> None:
    """Draw GB/s, and their ratio to the limit, over concurrent handoffs: two panels per block size, one line per
    transport or peer."""
    sizes = list(dict.fromkeys(point.block_kib for point in points))
    figure, axes = _figure(2 * len(sizes))
    for number, kib in enumerate(sizes):
        speeds, ratios = axes[2 * number : 2 * number + 2]
        for name in dict.fromkeys(point.name for point in points if point.block_kib == kib):
            own = sorted(
                (point for point in points if (point.name, point.block_kib) == (name, kib)),
                key=lambda point: point.concurrency,
            )
            counts = [str(point.concurrency) for point in own]
            speeds.plot(counts, [point.speed / 1e9 for point in own], marker="o", label=name)
            ratios.plot(counts, [point.ratio for point in own], marker="o", label=name)
        speeds.set(xlabel="concurrent handoffs", ylabel="GB/s", ylim=(0, None), title=f"blocks of {kib} KiB")
        ratios.set(xlabel="concurrent handoffs", ylabel="ratio to the limit", ylim=(0, None), title=f"{kib} KiB")
        ratios.axhline(1.0, color="grey", linestyle=":")
        ratios.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _draw_sizes(axis: Any, result: SimulationResult) -> None:
    ends = [*(sizes.at_s for sizes in result.sizes[1:]), result.duration_s]
    for role in result.sizes[0].sizes:
        values = [sizes.sizes[role] for sizes in result.sizes]
        axis.stairs(values, [result.sizes[0].at_s, *ends], label=role, baseline=None)
    axis.set(xlabel="s", ylabel="instances", title="autoscaling")
    axis.legend()


def _label(summary: Summary, scales: set[float]) -> str:
    return summary.policy if len(scales) == 1 else f"{summary.policy}, {summary.offered_per_s:.3g}/s"


def _figure(count: int) -> tuple[Any, list[Any]]:
    # `Figure` instead of pyplot, which needs a display on some machines and keeps global state.
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(5.5 * count, 4.2), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])

"""Results of `baton-bench pd`: goodput under any targets, also from files of earlier runs, and where separate prefill
is worse.
"""

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from baton_serve.bench.serving.load_client import RequestOutcome, percentile

APART, UNIFIED = "1P1D", "2 unified"
OBJECTIVES_MS = (6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 75, 100, 150, 200)
"""ITL targets of the curve."""
RUN = "pd-run"
"""Value of `bench` in the lines of `--json` that hold a whole run."""
TICK_S = 1e-5
"""Unit in which inter-token gaps are stored. Integers of 10 µs keep files of millions of gaps small."""


@dataclass(frozen=True, slots=True)
class PdSetup:
    """One configuration of `baton serve` with its load. `chunk` is `--max-num-batched-tokens`; `itl_ms` and `ttft_ms`
    are the SLOs of every request, 0 for none."""

    layout: str
    chunk: int
    flags: tuple[str, ...]
    itl_ms: float = 0.0
    ttft_ms: float = 0.0

    @property
    def name(self) -> str:
        slo = f", ITL SLO {self.itl_ms:g} ms" if self.itl_ms else ""
        slo += f", TTFT SLO {self.ttft_ms:g} ms" if self.ttft_ms else ""
        return f"{self.layout}, chunk {self.chunk}{slo}"


class Causes(NamedTuple):
    """Numbers of requests that are not good, by cause; each request counts once."""

    failed: int
    first_token: int
    first_gap: int
    """Requests that miss the ITL target only because of the gap between the first two tokens."""
    later_gaps: int


@dataclass(frozen=True, slots=True)
class Measured:
    """The outcomes of one setup at one rate."""

    setup: PdSetup
    rate: float
    span_s: float
    """Seconds from the first arrival to the last."""
    outcomes: list[RequestOutcome]

    @property
    def served(self) -> list[RequestOutcome]:
        """Return the outcomes of successful requests."""
        return [outcome for outcome in self.outcomes if outcome.error is None]

    def goodput(self, ttft_s: float, itl_s: float) -> float:
        """Return requests per second that meet both targets."""
        good = [o for o in self.served if o.ttft_s <= ttft_s and (not o.itls_s or percentile(o.itls_s, 99) <= itl_s)]
        return len(good) / self.span_s

    def causes(self, ttft_s: float, itl_s: float) -> Causes:
        """Count the requests that miss the targets, by cause."""
        failed = len(self.outcomes) - len(self.served)
        late = [o for o in self.served if o.ttft_s > ttft_s]
        slow = [o for o in self.served if o.ttft_s <= ttft_s and o.itls_s and percentile(o.itls_s, 99) > itl_s]
        later = [o for o in slow if o.itls_s[1:] and percentile(o.itls_s[1:], 99) > itl_s]
        return Causes(failed, len(late), len(slow) - len(later), len(later))

    def first_gap_s(self, percent: float) -> float:
        """Return a percentile, over requests, of the gap between the first two tokens, in seconds."""
        return percentile([o.itls_s[0] for o in self.served if o.itls_s] or [0.0], percent)

    @property
    def mean_held_s(self) -> float:
        """Return how long the router held back first tokens on average."""
        return statistics.fmean(o.held_s for o in self.served)

    @property
    def mean_ttft_s(self) -> float:
        return statistics.fmean(o.ttft_s for o in self.served)

    def itl_s(self, percent: float) -> float:
        """Return a percentile over all gaps between tokens of all requests, in seconds."""
        return percentile([gap for o in self.served for gap in o.itls_s] or [0.0], percent)


def curve(found: Sequence[Measured], ttft_s: float) -> dict[int, tuple[float, float]]:
    """Return the best goodput of each layout (1P1D, unified), by ITL target in ms."""

    def best(layout: str, objective_ms: int) -> float:
        ours = (measured for measured in found if measured.setup.layout == layout)
        return max((measured.goodput(ttft_s, objective_ms / 1e3) for measured in ours), default=0.0)

    return {objective: (best(APART, objective), best(UNIFIED, objective)) for objective in OBJECTIVES_MS}


def lines(found: Sequence[Measured], ttft_s: float) -> dict[str, list[float]]:
    """Return for each setup the best goodput over its rates, at each target of `OBJECTIVES_MS`."""
    by_setup: dict[str, list[Measured]] = {}
    for measured in found:
        by_setup.setdefault(measured.setup.name, []).append(measured)
    return {
        name: [max(measured.goodput(ttft_s, at / 1e3) for measured in runs) for at in OBJECTIVES_MS]
        for name, runs in by_setup.items()
    }


def line_of(measured: Measured) -> str:
    """Encode a whole run as one JSON line, which `read_runs` decodes."""
    outcomes = [
        {
            "ttft_s": round(o.ttft_s, 6),
            "gaps": [round(gap / TICK_S) for gap in o.itls_s],
            "error": o.error,
            "held_s": round(o.held_s, 6),
            "to_step_s": o.to_step_s,
            "decision": o.decision,
        }
        for o in measured.outcomes
    ]
    setup = measured.setup
    header = {"layout": setup.layout, "chunk": setup.chunk, "itl_ms": setup.itl_ms}
    header |= {"ttft_ms": setup.ttft_ms, "rate": measured.rate}
    return json.dumps({"bench": RUN, **header, "span_s": measured.span_s, "outcomes": outcomes}, separators=(",", ":"))


def read_runs(paths: Sequence[Path]) -> list[Measured]:
    """Read runs from output of `--json`; other lines are skipped. Raises `ValueError` if a line is damaged or no file
    has a run."""
    found: list[Measured] = []
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            try:
                run = json.loads(line)
                if run["bench"] != RUN:
                    continue
                outcomes = [
                    RequestOutcome(
                        ttft_s=o["ttft_s"],
                        itls_s=[gap * TICK_S for gap in o["gaps"]],
                        error=o["error"],
                        held_s=o.get("held_s", 0.0),
                        to_step_s=o.get("to_step_s"),
                        decision=o.get("decision", ""),
                    )
                    for o in run["outcomes"]
                ]
                setup = PdSetup(run["layout"], run["chunk"], (), run.get("itl_ms", 0.0), run.get("ttft_ms", 0.0))
                found.append(Measured(setup, run["rate"], run["span_s"], outcomes))
            except (KeyError, TypeError, ValueError) as exc:
                raise ValueError(f"{path}:{number} is not a line of `baton-bench pd --json`") from exc
    if not found:
        raise ValueError("the given files have no run of `baton-bench pd --json`")
    return found


def losses(found: Sequence[Measured], ttft_s: float) -> Iterator[str]:
    """Yield one sentence for each ITL target and each rate at which 1P1D is worse than two unified instances."""
    worse = {at: pair for at, pair in curve(found, ttft_s).items() if pair[0] < pair[1]}
    for at, (apart, unified) in worse.items():
        yield f"goodput at p99 ITL <= {at} ms, TTFT <= {ttft_s * 1e3:g} ms: {apart:.3g} against {unified:.3g} req/s"
    for rate in dict.fromkeys(measured.rate for measured in found):
        runs = [measured for measured in found if measured.rate == rate and measured.served]
        least = {
            layout: min((m.mean_ttft_s for m in runs if m.setup.layout == layout), default=None)
            for layout in (APART, UNIFIED)
        }
        apart_s, unified_s = least[APART], least[UNIFIED]
        if apart_s is not None and unified_s is not None and apart_s > unified_s:
            yield f"mean TTFT at {rate:g}/s: {apart_s * 1e3:.4g} against {unified_s * 1e3:.4g} ms"

"""What `baton-bench pd` measured: goodput under any objectives, also of earlier runs, and where prefill apart loses."""

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from baton_serve.bench.serving.serve import RequestOutcome, percentile

APART, UNIFIED = "1P1D", "2 unified"
OBJECTIVES_MS = (6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 75, 100, 150, 200)
"""Of the gaps between tokens, for the curve."""
RUN = "pd-run"
"""Marks the lines of `--json` that hold a whole run."""
TICK_S = 1e-5
"""In which gaps are kept."""


@dataclass(frozen=True, slots=True)
class PdSetup:
    """`chunk`: most tokens of a step. `itl_ms`, `ttft_ms`: promised to every request; 0: nothing."""

    layout: str
    chunk: int
    flags: tuple[str, ...]
    itl_ms: float = 0.0
    ttft_ms: float = 0.0

    @property
    def name(self) -> str:
        promise = f", {self.itl_ms:g} ms promised" if self.itl_ms else ""
        promise += f", first token {self.ttft_ms:g} ms" if self.ttft_ms else ""
        return f"{self.layout}, chunk {self.chunk}{promise}"


class Causes(NamedTuple):
    """Numbers of requests; each counts once."""

    failed: int
    first_token: int
    first_gap: int
    """Were it not for the gap between the first two tokens, they would be good."""
    later_gaps: int


@dataclass(frozen=True, slots=True)
class Measured:
    setup: PdSetup
    rate: float
    span_s: float
    """From the first arrival to the last."""
    outcomes: list[RequestOutcome]

    @property
    def served(self) -> list[RequestOutcome]:
        return [outcome for outcome in self.outcomes if outcome.error is None]

    def goodput(self, ttft_s: float, itl_s: float) -> float:
        good = [o for o in self.served if o.ttft_s <= ttft_s and (not o.itls_s or percentile(o.itls_s, 99) <= itl_s)]
        return len(good) / self.span_s

    def causes(self, ttft_s: float, itl_s: float) -> Causes:
        """Why requests are not good."""
        failed = len(self.outcomes) - len(self.served)
        late = [o for o in self.served if o.ttft_s > ttft_s]
        slow = [o for o in self.served if o.ttft_s <= ttft_s and o.itls_s and percentile(o.itls_s, 99) > itl_s]
        later = [o for o in slow if o.itls_s[1:] and percentile(o.itls_s[1:], 99) > itl_s]
        return Causes(failed, len(late), len(slow) - len(later), len(later))

    def first_gap_s(self, percent: float) -> float:
        """Between the first two tokens of each request."""
        return percentile([o.itls_s[0] for o in self.served if o.itls_s] or [0.0], percent)

    @property
    def mean_held_s(self) -> float:
        return statistics.fmean(o.held_s for o in self.served)

    @property
    def mean_ttft_s(self) -> float:
        return statistics.fmean(o.ttft_s for o in self.served)

    def itl_s(self, percent: float) -> float:
        """Of all gaps of all requests."""
        return percentile([gap for o in self.served for gap in o.itls_s] or [0.0], percent)


def curve(found: Sequence[Measured], ttft_s: float) -> dict[int, tuple[float, float]]:
    """By objective of the gaps in ms: the best goodput of each layout."""

    def best(layout: str, objective_ms: int) -> float:
        ours = (measured for measured in found if measured.setup.layout == layout)
        return max((measured.goodput(ttft_s, objective_ms / 1e3) for measured in ours), default=0.0)

    return {objective: (best(APART, objective), best(UNIFIED, objective)) for objective in OBJECTIVES_MS}


def lines(found: Sequence[Measured], ttft_s: float) -> dict[str, list[float]]:
    """By setup: the best goodput over its rates at each of `OBJECTIVES_MS`."""
    by_setup: dict[str, list[Measured]] = {}
    for measured in found:
        by_setup.setdefault(measured.setup.name, []).append(measured)
    return {
        name: [max(measured.goodput(ttft_s, at / 1e3) for measured in runs) for at in OBJECTIVES_MS]
        for name, runs in by_setup.items()
    }


def line_of(measured: Measured) -> str:
    """All that is known of a run, as JSON: what `read_runs` reads."""
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
    told = {"layout": setup.layout, "chunk": setup.chunk, "itl_ms": setup.itl_ms}
    told |= {"ttft_ms": setup.ttft_ms, "rate": measured.rate}
    return json.dumps({"bench": RUN, **told, "span_s": measured.span_s, "outcomes": outcomes}, separators=(",", ":"))


def read_runs(paths: Sequence[Path]) -> list[Measured]:
    """Of what `--json` printed earlier, other lines left out. Raises ValueError."""
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
                raise ValueError(f"{path}:{number} is not what `baton-bench pd --json` prints") from exc
    if not found:
        raise ValueError("no run of `baton-bench pd --json` is in what was given")
    return found


def losses(found: Sequence[Measured], ttft_s: float) -> Iterator[str]:
    """In words, where one prefill and one decode instance are worse than two unified ones."""
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

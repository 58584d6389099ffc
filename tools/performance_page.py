#!/usr/bin/env python3
"""Write docs/performance.md from the newest results in baton_serve/bench/results.

`python -m tools.performance_page` writes the page. `--check` writes nothing and fails if the page is not current.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "baton_serve" / "bench" / "results"
SIMULATION_INPUTS = {"h200-llama-3.1-8b-steps.json"}
"""Step times that `baton-bench plan --prompt-steps` reads. They answer no question of the page."""

QUESTIONS = {
    "engine_gpu": ("The engine on a GPU", ["gpu-engine.md", "gpu-kernels.md"]),
    "engine_cpu": ("The engine on a CPU", ["cpu-engine.md"]),
    "low_bit": ("Low-bit formats", ["low-bit-formats.md"]),
    "transfer": ("Block transfer and handoff", ["block-transfer.md"]),
    "router": ("The router", ["router.md", "placement.md"]),
    "pd": ("P/D against unified instances", ["pd-against-unified.md", "cpu-engine.md"]),
    "start": ("Start", ["start.md"]),
    "faults": ("Under faults and hostile requests", ["router.md"]),
}
"""The heading of each question, in the order of the page, and the pages of the log with its earlier runs."""

PLOTS = {
    "pd": "Plots of goodput: [TTFT 1 s](images/pd-h200.png), [250 ms](images/pd-h200-250.png).",
}
"""A line below the tables of a question."""

LESS_IS_BETTER = {"ms", "s", "µs", "GB", "MiB", "%", "errors", "of 10 min"}
MORE_IS_BETTER = {"windows/s", "x real time", "tok/s", "req/s", "million/s", "GB/s", "of memcpy", "requests"}

HEAD = """# Performance

Made by `python -m tools.performance_page` from [baton_serve/bench/results](../baton_serve/bench/results): \
the newest run of each question. The files hold more cases and software versions; \
the [log](log/README.md) has earlier runs and what did not help.

* **Limit**: what the machine allows, computed from its memory bandwidth, matrix product, copies or TCP, mostly \
measured in the same run. **Of limit**: 1 is the limit itself; of alternate runs, the median ratio.
* **Peer**: other software, or another setup, under the same load. **Times peer**: above 1, Baton is faster.
* A hash names the commit that recorded a run; rows of another run have their own.
* **To run again**: run the table's command, write its figures into the result's file, and make this page again. \
On shared machines compare ratios only.

**Not measured**: Intel Arc cards, more than two GPUs, transfers between hosts, real weights on a GPU.
"""


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measured case.

    `ratio` replaces value / limit where a benchmark recorded the median of the ratios of alternate runs.
    `date` and `commit` stand for those of the file where the row comes from another run.
    `page` is false for a case that the page leaves out to stay short.
    """

    case: str
    value: float
    unit: str
    limit: float | None = None
    peer: float | None = None
    peer_name: str | None = None
    note: str = ""
    ratio: float | None = None
    date: str = ""
    commit: str = ""
    page: bool = True


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The newest run of one question on one machine by one command."""

    question: str
    title: str
    date: str
    commit: str
    machine: str
    command: str
    rows: list[Row]
    note: str = ""
    details: str = ""


def main() -> int:
    text = build(load(RESULTS))
    if "--check" in sys.argv:
        return int(not PAGE.exists() or PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


def load(folder: Path) -> list[Result]:
    """Return the results in `folder`, ordered by file name. Raise ValueError, which names the file, for a wrong one."""
    found = []
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stem):
        if path.name in SIMULATION_INPUTS:
            continue
        try:
            result = msgspec.json.decode(path.read_bytes(), type=Result)
            check(result)
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from error
        found.append(result)
    return found


def check(result: Result) -> None:
    """Raise ValueError if the page cannot show `result`."""
    if result.question not in QUESTIONS:
        raise ValueError(f"the question {result.question!r} is unknown; use one of {', '.join(QUESTIONS)}")
    if not any(row.page for row in result.rows):
        raise ValueError("it has no row for the page")
    for date, commit in [(result.date, result.commit), *((row.date, row.commit) for row in result.rows)]:
        if date and not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
            raise ValueError(f"the date {date!r} is not YYYY-MM-DD")
        if commit and not re.fullmatch(r"[0-9a-f]{7,40}", commit):
            raise ValueError(f"the commit {commit!r} is not a hash")
    for row in result.rows:
        if row.unit not in LESS_IS_BETTER | MORE_IS_BETTER:
            raise ValueError(f"add the unit {row.unit!r} to LESS_IS_BETTER or MORE_IS_BETTER of this tool")
        if (row.peer is None) != (row.peer_name is None):
            raise ValueError(f"the case {row.case!r} needs both a peer and its name, or neither")


def build(results: list[Result]) -> str:
    """Return the whole page."""
    parts = [HEAD]
    for question, (heading, logs) in QUESTIONS.items():
        parts.append(f"\n## {heading}\n")
        by_command: dict[tuple[str, str], list[Result]] = defaultdict(list)
        for result in results:
            if result.question == question:
                by_command[result.title, result.command].append(result)
        parts += [section(runs) for runs in by_command.values()]
        if question in PLOTS:
            parts.append(f"\n{PLOTS[question]}\n")
        links = ", ".join(f"[{name.removesuffix('.md')}](log/{name})" for name in logs)
        parts.append(f"\nLog: {links}.\n")
    return "".join(parts)


def section(runs: list[Result]) -> str:
    """Return the heading and the command that `runs` have in common, and a table for each machine."""
    tables = []
    for run in runs:
        origin = f"{run.date}, `{run.commit}`, {run.machine}. {run.note}".rstrip()
        tables.append(f"\n{origin}\n\n{table(run.rows)}")
    return f"\n### {runs[0].title}\n\n`{runs[0].command}`\n" + "".join(tables)


def table(all_rows: list[Row]) -> str:
    """Return the rows that the page shows. Columns without any cell are left out."""
    rows = [row for row in all_rows if row.page]
    peers = {row.peer_name for row in rows if row.peer_name}
    common = peers.pop() if len(peers) == 1 else None
    columns = {
        "Case": [row.case for row in rows],
        "Value": [f"{number(row.value)} {row.unit}" for row in rows],
        "Limit": [number(row.limit, digits=3) for row in rows],
        "Of limit": [share(row) for row in rows],
        common or "Peer": [peer(row, named=common is None) for row in rows],
        "Times peer": [times(row) for row in rows],
        "Note": [note(row) for row in rows],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    lines = [line(shown), line(["---"] * len(shown)), *map(line, zip(*shown.values(), strict=True))]
    return "\n".join(lines) + "\n"


def line(cells: Iterable[str]) -> str:
    return "|" + "|".join(cell.replace("|", r"\|") for cell in cells) + "|"


def number(value: float | None, digits: int = 4) -> str:
    """Return `value` with at most `digits` significant digits, and all digits before the point."""
    if value is None:
        return ""
    if abs(value) < 1000:
        return f"{value:.{digits}g}"
    whole = round(value)
    return f"{round(whole, digits - len(str(whole))) if digits < 4 else whole:,}"


def share(row: Row) -> str:
    """Return how much of the limit is reached; 1 is all of it."""
    if row.ratio is not None:
        return f"{row.ratio:.2f}"
    if row.limit is None:
        return ""
    return f"{row.limit / row.value if row.unit in LESS_IS_BETTER else row.value / row.limit:.2f}"


def peer(row: Row, *, named: bool) -> str:
    return f"{number(row.peer)} ({row.peer_name})" if named and row.peer_name else number(row.peer)


def times(row: Row) -> str:
    """Return how many times as fast as the peer the row is."""
    if row.peer is None:
        return ""
    ratio = row.peer / row.value if row.unit in LESS_IS_BETTER else row.value / row.peer
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def note(row: Row) -> str:
    parts = [row.note, f"`{row.commit}`" if row.commit else ""]
    return ", ".join(part for part in parts if part)


if __name__ == "__main__":
    sys.exit(main())

"""What every benchmark prints: a table for people and, with `--json`, one object a line for programs.

A speed is told as a ratio to a limit measured in the same run, and beside a peer's value where there is one.
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """`ratio` is value / limit (or limit / value where less is better): 1 is the limit reached. Where value and limit
    were taken in turns, all three are medians, each of its own, and `quartiles` those of the ratio."""

    bench: str
    case: str
    value: float
    unit: str
    limit: float | None = None
    ratio: float | None = None
    peer: str | None = None
    peer_value: float | None = None
    quartiles: tuple[float, float] | None = None


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return " to ".join(map(_cell, value))
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def show(rows: Iterable[Row], *, as_json: bool) -> None:
    rows = list(rows)
    if as_json:
        for row in rows:
            sys.stdout.write(json.dumps(asdict(row)) + "\n")
        return
    header = ("bench", "case", "value", "unit", "limit", "ratio", "peer", "peer value", "quartiles of the ratio")
    cells = [header, *(tuple(_cell(value) for value in asdict(row).values()) for row in rows)]
    if not any(row.quartiles for row in rows):
        cells = [line[:-1] for line in cells]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    for line in cells:
        sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n")

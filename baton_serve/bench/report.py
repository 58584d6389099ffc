"""The output of every benchmark: a table for people or, with `--json`, one JSON object per line.

A speed is reported as a ratio to a limit that was measured in the same run, and beside the value of a peer if one was
measured.
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One measured value. `ratio` is value / limit, or limit / value if less is better, so that 1 means that the limit
    was reached. If value and limit were measured alternately, each of the three is a median of its own, and
    `quartiles` are those of the ratio."""

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
    """Write the rows to stdout. The column of quartiles is left out if no row has them."""
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

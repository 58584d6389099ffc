"""What every benchmark prints: a table for people and, with `--json`, one object a line for programs.

A speed is told as a ratio to a limit measured in the same run, and beside a peer's value where there is one.
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """`ratio` is value / limit (or limit / value where less is better): 1 is the limit reached."""

    bench: str
    case: str
    value: float
    unit: str
    limit: float | None = None
    ratio: float | None = None
    peer: str | None = None
    peer_value: float | None = None


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def show(rows: Iterable[Row], *, as_json: bool) -> None:
    rows = list(rows)
    if as_json:
        for row in rows:
            sys.stdout.write(json.dumps(asdict(row)) + "\n")
        return
    header = ("bench", "case", "value", "unit", "limit", "ratio", "peer", "peer value")
    cells = [header, *(tuple(_cell(value) for value in asdict(row).values()) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    for line in cells:
        sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n")

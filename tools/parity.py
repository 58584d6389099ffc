#!/usr/bin/env python3
"""Write docs/reference/parity.md, the table of what vLLM and Intel's builds of it have, from tools/parity.toml.

`python -m tools.parity` writes the page. `--check` writes nothing and fails if the page is not current.
"""

import ast
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "parity.md"
ROWS = ROOT / "tools" / "parity.toml"

Verdict = Literal["Y", "P", "n", "x"]
Scope = Literal["", "models", "hardware", "speculation"]
VERDICTS: tuple[Verdict, ...] = ("Y", "P", "n", "x")

HEAD = """# Parity with vLLM on Intel GPUs

Made by `python -m tools.parity` from [tools/parity.toml](../../tools/parity.toml). The rows are the features that \
the documents of vLLM, of Intel's builds of vLLM and of IPEX-LLM describe.

* **Y**: works, and the named test (below `tests/`) shows it. **P**: works in part. **n**: missing. **x**: does not \
apply, for example a claim, an internal switch, another project's tool, or what vLLM has removed since. P, n and x \
have a reason.
* A flag is Y if it has the effect of vLLM's flag, or if that effect is given without it and the log says so. A test \
beside P shows the part that works.
* **Scope**: *models* marks rows that ask for a kind of model, *hardware* rows that can only be shown on Intel GPUs, \
on several GPUs or on several hosts. *speculation* marks speculative decoding, which Baton does not have yet. The \
other rows are those *outside models and hardware*, counted with and without speculative decoding.
* No row has been tried on an Intel GPU, and models are compared with small random weights \
([hardware](hardware.md), [models](models.md)).
"""


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One feature: the test that shows it for Y, the reason for every other verdict.

    `test` is a path below `tests/` and the name of a function in it. A row of verdict Y may have a `reason` too: a note
    on how the feature differs. `scope` replaces that of the group; "" is none of the others.
    """

    id: str
    name: str
    verdict: Verdict
    test: str = ""
    reason: str = ""
    scope: Scope | None = None


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rows of one subject."""

    id: str
    title: str
    rows: list[Row]
    scope: Scope = ""


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of tools/parity.toml."""

    group: list[Group]


def load(path: Path = ROWS) -> list[Group]:
    """Return the groups in the file's order. Raises `msgspec.ValidationError` for unknown keys and verdicts."""
    return msgspec.convert(tomllib.loads(path.read_text()), Table).group


def scope_of(group: Group, row: Row) -> Scope:
    return group.scope if row.scope is None else row.scope


def outside_models_and_hardware(groups: Iterable[Group]) -> list[Row]:
    return [row for group in groups for row in group.rows if scope_of(group, row) in ("", "speculation")]


def outside_speculation(groups: Iterable[Group]) -> list[Row]:
    return [row for group in groups for row in group.rows if not scope_of(group, row)]


def defects(groups: Iterable[Group], tests: Path = ROOT / "tests") -> list[str]:
    """Return what is wrong with the table, one line for each defect; the tests are looked up below `tests`."""
    found: list[str] = []
    seen: set[str] = set()
    for group in groups:
        for row in group.rows:
            if row.id in seen:
                found.append(f"{row.id}: occurs twice")
            seen.add(row.id)
            if row.id.rpartition(".")[0] != group.id:
                found.append(f"{row.id}: does not belong to group {group.id}")
            found += [f"{row.id}: {defect}" for defect in _defects_of(row, tests)]
    return found


def _defects_of(row: Row, tests: Path) -> list[str]:
    found = []
    if row.verdict == "Y" and not row.test:
        found.append("Y without a test")
    if row.verdict != "Y" and not row.reason:
        found.append(f"{row.verdict} without a reason")
    if row.test:
        name, _, function = row.test.partition("::")
        if function not in _functions(tests / name):
            found.append(f"there is no test {row.test}")
    return found


@cache
def _functions(path: Path) -> frozenset[str]:
    """Return the names of the test functions in a file. A missing file has none."""
    if not path.is_file():
        return frozenset()
    functions = (
        n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return frozenset(function.name for function in functions if function.name.startswith("test_"))


def counts(rows: Iterable[Row]) -> Counter[Verdict]:
    return Counter(row.verdict for row in rows)


def build(groups: list[Group]) -> str:
    """Return the page: totals, counts by group, and a table of rows for each group."""
    everything = [row for group in groups for row in group.rows]
    outside = outside_models_and_hardware(groups)
    lines = [HEAD, "| | Rows | Y | P | n | x | Y of applicable rows |", "|---|---|---|---|---|---|---|"]
    lines.append(_count_line("**All**", everything))
    lines.append(_count_line("**Outside models and hardware**", outside))
    lines.append(_count_line("**The same without speculative decoding**", outside_speculation(groups)))
    lines += [_count_line(f"{group.id} {group.title}", group.rows) for group in groups]
    for group in groups:
        lines += [
            f"\n## {group.id} {group.title}\n",
            "| Row | Feature | | Scope | Test or reason |",
            "|---|---|---|---|---|",
        ]
        lines += [_row_line(row, scope_of(group, row)) for row in group.rows]
    return "\n".join(lines) + "\n"


def _count_line(title: str, rows: list[Row]) -> str:
    number = counts(rows)
    applies = len(rows) - number["x"]
    share = f"{100 * number['Y'] / applies:.1f} %" if applies else ""
    cells = [title, str(len(rows)), *(str(number[verdict]) for verdict in VERDICTS), share]
    return f"| {' | '.join(cells)} |"


def _row_line(row: Row, scope: Scope) -> str:
    shown = "; ".join(filter(None, (f"`{row.test}`" if row.test else "", row.reason)))
    return f"| {row.id} | {_cell(row.name)} | {row.verdict} | {scope} | {_cell(shown)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    groups = load()
    wrong = defects(groups)
    if wrong:
        raise SystemExit("\n".join(wrong))
    page = build(groups)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page)
    elif PAGE.read_text() != page:
        raise SystemExit("docs/reference/parity.md is not current: run python -m tools.parity")


if __name__ == "__main__":
    main()

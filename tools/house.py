#!/usr/bin/env python3
"""Print the figures of the house: how the code is divided, what depends on what, and how it is described.

`make house` prints one row for each figure, with its target. `tests/structure/test_house.py` keeps the targets.
"""

import itertools
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tools.prose import ROOT, Finding, findings_in, product_files, supporting_files
from tools.reading import read

SMALL_FILE_LINES = 60
LARGE_CLASS_LINES = 250
PLUG_INS = (
    "services/router/text/tool_calls",
    "services/router/text/reasoning",
    "services/router/text/scanning",
    "baton_serve/engine/loading/quantization/checkpoints",
    "baton_serve/engine/kernels",
    "kvtransfer/transports",
    "services/common/registry",
    "baton_serve/contracts",
)
"""Folders in which a small file is one implementation of a port."""


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    value: float
    target: float
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        return self.value >= self.target if self.at_least else self.value <= self.target


@dataclass(frozen=True, slots=True)
class Rooms:
    """The direct children of a package, and who imports whom."""

    rooms: frozenset[str]
    arrows: frozenset[tuple[str, str]]

    def upward(self) -> list[tuple[str, str]]:
        """Return the fewest arrows without which no room depends on itself."""
        found: list[tuple[str, str]] = []
        for members in self._cycles():
            inside = [arrow for arrow in self.arrows if set(arrow) <= set(members)]
            if len(members) > 8:  # too many orders to try: every arrow of the cycle counts
                found += inside
                continue
            orders = itertools.permutations(sorted(members))
            found += sorted((_upward_in(order, inside) for order in orders), key=len)[0]
        return sorted(found)

    def floors(self) -> int:
        """Return the length of the longest chain of imports, without the upward ones."""
        below: dict[str, set[str]] = defaultdict(set)
        for importer, imported in self.arrows - set(self.upward()):
            below[importer].add(imported)

        @cache
        def height(room: str) -> int:
            return 1 + max((height(other) for other in below[room]), default=0)

        return max(height(room) for room in self.rooms)

    def _cycles(self) -> Iterator[frozenset[str]]:
        reached = {room: self._reachable(room) for room in self.rooms}
        groups = {frozenset(o for o in reached[room] if room in reached[o]) for room in self.rooms}
        yield from (group for group in groups if len(group) > 1)

    def _reachable(self, start: str) -> frozenset[str]:
        seen, todo = set[str](), [start]
        while todo:
            room = todo.pop()
            new = {b for a, b in self.arrows if a == room} - seen
            seen |= new
            todo += new
        return frozenset(seen)


def _upward_in(order: tuple[str, ...], arrows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [arrow for arrow in arrows if order.index(arrow[0]) > order.index(arrow[1])]


def rooms_of(package: str) -> Rooms:
    """Read the rooms of a package such as `services.router`, and the imports between them."""
    prefix = f"baton_serve.{package}"
    folder = ROOT / "baton_serve" / package.replace(".", "/")
    modules = {_dotted(path, folder, prefix): path for path in _python_files(folder)}
    arrows = set()
    for module, path in modules.items():
        room = _room(module, prefix)
        for imported in _imports(path.read_text(), modules):
            other = _room(imported, prefix)
            if room and other and room != other:
                arrows.add((room, other))
    return Rooms(frozenset(filter(None, (_room(module, prefix) for module in modules))), frozenset(arrows))


def _python_files(folder: Path) -> list[Path]:
    """Return the files below a folder that may be a link; `Path.rglob` follows no links."""
    walked = os.walk(folder.resolve())
    return [Path(parent) / name for parent, _, names in walked for name in names if name.endswith(".py")]


def _dotted(path: Path, folder: Path, prefix: str) -> str:
    relative = path.relative_to(folder.resolve()).with_suffix("")
    return ".".join((prefix, *relative.parts)).removesuffix(".__init__")


def _room(module: str, prefix: str) -> str | None:
    return module.removeprefix(prefix + ".").split(".")[0] if module.startswith(prefix + ".") else None


def _imports(source: str, modules: Iterable[str]) -> Iterator[str]:
    known = set(modules)
    for module, name in read(source).imports:
        full = f"{module}.{name}"
        yield full if name and full in known else module


def duplicate_classes() -> dict[str, list[Path]]:
    """Return the public class names that two or more modules of the product define."""
    places: dict[str, list[Path]] = defaultdict(list)
    for path in product_files():
        for name, _, _ in read(path.read_text()).classes:
            if not name.startswith("_"):
                places[name].append(path)
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def large_classes() -> list[str]:
    """Return the classes of `LARGE_CLASS_LINES` lines of code and more; docstrings and comments are not counted."""
    found: list[str] = []
    for path in product_files():
        reading = read(path.read_text())
        for name, first, last in reading.classes:
            if len(reading.code_lines.intersection(range(first, last + 1))) >= LARGE_CLASS_LINES:
                found.append(f"{path.relative_to(ROOT)}: {name}")
    return found


def small_files() -> list[Path]:
    """Return the product's files under 60 lines that are neither entry points, package files nor plug-ins.

    A module that nothing imports is an entry point: a program of its own, or loaded by its name.
    """
    sources = {path: path.read_text() for path in product_files()}
    imported = {name for source in sources.values() for name in _imported_names(source)}
    return [
        path
        for path, source in sources.items()
        if path.name not in ("__init__.py", "__main__.py", "main.py", "errors.py", "settings.py")
        and not str(path.relative_to(ROOT)).startswith(PLUG_INS)
        and _module(path) in imported
        and len(source.splitlines()) < SMALL_FILE_LINES
    ]


def _module(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name if name.startswith("baton_serve.") else f"baton_serve.{name}"


def _imported_names(source: str) -> Iterator[str]:
    """Return the modules that a source imports, and the names that it takes from them, both in full."""
    for module, name in read(source).imports:
        if name:
            yield module
            yield f"{module}.{name}"


def comments_per_100_lines() -> float:
    """Return comments (runs of comment lines count by line) for each 100 lines of code."""
    readings = [read(path.read_text()) for path in product_files()]
    return 100 * sum(len(r.comments) for r in readings) / sum(len(r.code_lines) for r in readings)


def code_lines(source: str) -> int:
    """Count the lines that hold code: docstrings, comments and blank lines cost nothing."""
    return len(read(source).code_lines)


@cache
def prose_findings() -> list[Finding]:
    """Return what `tools.prose` finds in the product."""
    return [finding for path in product_files() for finding in findings_in(path)]


@cache
def supporting_prose_findings() -> list[Finding]:
    """Return what `tools.prose` finds in benchmarks, tools and tests."""
    return [finding for path in supporting_files() for finding in findings_in(path)]


GENERATED_LISTS = tuple(ROOT / "docs" / "reference" / name for name in ("parity.md", "models.md", "files.md"))
"""Pages whose words are not counted: generated lists of features, models and files, which are searched and not read."""


def words_of_documents() -> int:
    """Return the words of the documents that people read: docs/ without docs/log/ and `GENERATED_LISTS`."""
    documents = {path for path in (ROOT / "docs").rglob("*.md") if "log" not in path.relative_to(ROOT).parts}
    documents -= set(GENERATED_LISTS)
    return sum(len(re.findall(r"\S+", path.read_text())) for path in documents)


def figures() -> list[Figure]:
    rows = []
    for package, most_rooms, most_arrows, most_upward in (("services.router", 14, 60, 1), ("engine", 17, 80, 2)):
        rooms = rooms_of(package)
        rows += [
            Figure(f"{package}: rooms", len(rooms.rooms), most_rooms),
            Figure(f"{package}: floors", rooms.floors(), 9),
            Figure(f"{package}: imports between rooms", len(rooms.arrows), most_arrows),
            Figure(f"{package}: imports upward", len(rooms.upward()), most_upward),
        ]
    return [
        *rows,
        Figure("public class names defined twice", len(duplicate_classes()), 0),
        Figure(f"files under {SMALL_FILE_LINES} lines that are no plug-in", len(small_files()), 20),
        Figure(f"classes of {LARGE_CLASS_LINES} lines of code and more", len(large_classes()), 4),
        Figure("comments per 100 lines of code", round(comments_per_100_lines(), 1), 4, at_least=True),
        Figure("words of docs/ without docs/log/", words_of_documents(), 25_000),
        Figure("prose that must be read twice", len(prose_findings()), 80),
        Figure("the same in benchmarks, tools and tests", len(supporting_prose_findings()), 0),
    ]


def main() -> None:
    for figure in figures():
        bound = ">=" if figure.at_least else "<="
        print(
            f"{figure.name:<48}{figure.value:>9,g}   {bound} {figure.target:,g}{'' if figure.is_met else '   MISSED'}"
        )


if __name__ == "__main__":
    main()

"""The structure that `make house` prints keeps its targets."""

from collections.abc import Callable, Sequence

import pytest

from tools.house import (
    Figure,
    Rooms,
    duplicate_classes,
    figures,
    large_classes,
    prose_findings,
    small_files,
    supporting_prose_findings,
)

FIGURES = figures()
BUDGETS = {
    "files under 60 lines that are no plug-in": 20,
    "classes of 250 lines of code and more": 0,
    "prose that must be read twice": 0,
    "the same in benchmarks, tools and tests": 0,
}
"""Today's figures, which replace the targets of `tools.house`. A budget only shrinks: lower it with every change that
allows it."""
LEAST = {"comments per 100 lines of code": 4.4}
"""The same for figures that should grow."""
PLACES: dict[str, Callable[[], Sequence[object]]] = {
    "files under 60 lines that are no plug-in": small_files,
    "classes of 250 lines of code and more": large_classes,
    "prose that must be read twice": prose_findings,
    "the same in benchmarks, tools and tests": supporting_prose_findings,
}
"""Functions that list the places to look at, for a figure that is over its budget."""


@pytest.mark.parametrize("figure", FIGURES, ids=[figure.name for figure in FIGURES])
def test_no_figure_gets_worse(figure: Figure) -> None:
    if figure.at_least:
        assert figure.value >= LEAST.get(figure.name, figure.target)
    else:
        assert figure.value <= BUDGETS.get(figure.name, figure.target), _places(figure)


def test_each_public_class_name_is_defined_once() -> None:
    assert not duplicate_classes()


def test_rooms_that_import_each_other_have_one_upward_arrow() -> None:
    rooms = Rooms(frozenset("abc"), frozenset({("a", "b"), ("b", "c"), ("c", "b")}))
    assert rooms.upward() in ([("b", "c")], [("c", "b")])
    assert rooms.floors() == 3 if rooms.upward() == [("c", "b")] else rooms.floors() >= 2


def _places(figure: Figure) -> list[str]:
    return [str(place) for place in PLACES[figure.name]()] if figure.name in PLACES else []

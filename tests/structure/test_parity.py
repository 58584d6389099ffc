"""docs/reference/parity.md shows tools/parity.toml: each Y names a test that exists, the others have a reason."""

import re
from pathlib import Path

import msgspec
import pytest

from tools import parity
from tools.parity import Group, Row


def group(*rows: Row) -> list[Group]:
    return [Group("2a", "Flags", list(rows))]


def test_every_row_names_a_test_that_exists_or_a_reason() -> None:
    assert parity.defects(parity.load()) == []


def test_the_page_is_what_the_table_makes_of_it() -> None:
    assert parity.PAGE.read_text() == parity.build(parity.load()), "run python -m tools.parity"


def test_the_counts_of_the_page_are_those_of_its_rows() -> None:
    page = parity.PAGE.read_text()
    verdicts = re.findall(
        r"^\| \w+\.\d+ \| .* \| ([YPnx]) \| (?:models|hardware|speculation)? ?\| ", page, re.MULTILINE
    )
    total = re.search(r"^\| \*\*All\*\* \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", page, re.MULTILINE)
    assert total is not None
    assert [int(number) for number in total.groups()] == [548, *(verdicts.count(v) for v in parity.VERDICTS)]


def test_every_row_of_the_list_of_features_has_a_verdict() -> None:
    numbers = {found.id: len(found.rows) for found in parity.load()}
    assert sum(numbers.values()) == 548
    for found in parity.load():
        assert [row.id for row in found.rows] == [f"{found.id}.{n}" for n in range(1, numbers[found.id] + 1)]


def test_a_defect_of_a_row_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_flags.py").write_text("def test_a_flag_works() -> None: ...\n")
    good = Row("2a.1", "--host", "Y", test="test_flags.py::test_a_flag_works")
    assert parity.defects(group(good), tmp_path) == []
    assert parity.defects(group(good, good), tmp_path) == ["2a.1: occurs twice"]
    strange = Row("2b.1", "--task", "x", reason="r")
    assert parity.defects(group(strange), tmp_path) == ["2b.1: does not belong to group 2a"]
    assert parity.defects(group(Row("2a.2", "--port", "Y")), tmp_path) == ["2a.2: Y without a test"]
    assert parity.defects(group(Row("2a.3", "-pp", "P")), tmp_path) == ["2a.3: P without a reason"]
    missing = Row("2a.4", "-tp", "Y", test="test_flags.py::test_another")
    assert parity.defects(group(missing), tmp_path) == ["2a.4: there is no test test_flags.py::test_another"]


def test_a_row_counts_by_its_own_scope_or_that_of_its_group() -> None:
    inside, outside = Row("14.1", "a", "n", reason="r"), Row("14.2", "b", "n", reason="r", scope="")
    assert parity.outside_models_and_hardware([Group("14", "Models", [inside, outside], scope="models")]) == [outside]


def test_a_verdict_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.toml"
    path.write_text('[[group]]\nid = "1a"\ntitle = "t"\nrows = [{ id = "1a.1", name = "n", verdict = "yes" }]\n')
    with pytest.raises(msgspec.ValidationError, match="verdict"):
        parity.load(path)

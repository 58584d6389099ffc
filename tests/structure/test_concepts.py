"""docs/concepts.md names files that exist and names that these files define."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "concepts.md").read_text()
FILE = re.compile(r"`((?:services|kvtransfer|baton_serve|tests)/[\w/]+\.py)`")
NAME = re.compile(r"`(\w+(?:\.\w+)?)`")
STEPS = re.findall(r"^\d+\. (.*)$", PAGE, re.MULTILINE)
ROWS = [line.split(" | ") for line in PAGE.partition("## Where is")[2].splitlines() if " | `" in line]
PLACES = [(FILE.findall(place)[0], name) for _, place in ROWS for name in NAME.findall(place)]


def names_defined_in(file: str) -> set[str]:
    """Return classes, functions, methods (`Class.method`) and module constants that a file defines."""
    found = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        match node:
            case ast.ClassDef():
                found |= {node.name} | {f"{node.name}.{n.name}" for n in node.body if hasattr(n, "name")}
                found |= {f"{node.name}.{ast.unparse(n.target)}" for n in node.body if isinstance(n, ast.AnnAssign)}
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                found.add(node.name)
            case ast.Assign():
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def test_the_page_has_twelve_steps_and_more_than_a_hundred_questions() -> None:
    assert len(STEPS) == 12
    assert len(ROWS) >= 115


def test_every_file_exists() -> None:
    assert [file for file in FILE.findall(PAGE) if not (ROOT / file).is_file()] == []


@pytest.mark.parametrize(("file", "name"), PLACES)
def test_the_file_of_an_answer_defines_its_name(file: str, name: str) -> None:
    assert name in names_defined_in(file)


@pytest.mark.parametrize("number", range(12))
def test_the_names_of_a_step_are_defined_in_its_files(number: int) -> None:
    files = FILE.findall(STEPS[number]) or ["services/router/requests/lifecycle.py"]
    files += ["services/router/requests/lifecycle.py"] if "RequestLifecycle" in STEPS[number] else []
    files += ["services/router/requests/prompt_request.py", "baton_serve/contracts/messages.py"]
    defined = set().union(*map(names_defined_in, files))
    assert [name for name in NAME.findall(STEPS[number]) if name not in defined] == []

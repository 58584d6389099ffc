"""Documents point at what is there: files, headings, and flags that some command has."""

import ast
import re
from pathlib import Path

import pytest

import baton_serve
from baton_serve.services.doctor.settings import DoctorSettings
from baton_serve.services.instance.settings import InstanceSettings
from baton_serve.services.local.settings import ServeSettings
from baton_serve.services.router.settings import RouterSettings

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "helm").rglob("*.md"),
        *(ROOT / "deploy").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ]
)
CODE = re.compile(r"```.*?```", re.DOTALL)
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
SETTINGS = (DoctorSettings, InstanceSettings, RouterSettings, ServeSettings)


def anchors(document: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ +(.*)$", CODE.sub("", document.read_text()), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip().lower())
        slug = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        times = found[slug] = found.get(slug, 0) + 1
        if times > 1:
            found[f"{slug}-{times - 1}"] = 1
    return set(found)


@pytest.mark.parametrize("document", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_links_lead_to_files_and_headings_that_are_there(document: Path) -> None:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", document.read_text())):
        if re.match(r"\w+:", target):
            continue
        file, _, heading = target.partition("#")
        path = document.parent / file if file else document
        if not path.exists() or (heading and path.suffix == ".md" and heading not in anchors(path)):
            dead.append(target)
    assert not dead


def test_flags_of_commands_in_documents_exist() -> None:
    """Of lines that call `baton serve`, an instance, the router or the doctor."""
    known = {name.replace("_", "-") for settings in SETTINGS for name in settings.__struct_fields__}
    known |= {"config", "help", "version"}
    called = 0
    for document in DOCUMENTS:
        text = document.read_text().replace("\\\n", " ")
        calls = re.findall(r"baton (?:serve|router|prefill|decode|unified|doctor)\b[^\n`#|]*", text)
        flags = {flag for call in calls for flag in re.findall(r"(?<= --)[a-z][a-z0-9-]+", call)}
        assert not {flag for flag in flags if flag.removeprefix("no-") not in known}, document
        called += len(flags)
    assert called > 20


def test_python_in_documents_imports_names_that_exist() -> None:
    imported = set[str]()
    for document in DOCUMENTS:
        for program in PYTHON.findall(document.read_text()):
            for node in ast.walk(ast.parse(program)):
                if isinstance(node, ast.ImportFrom) and node.module == "baton_serve":
                    imported |= {alias.name for alias in node.names}
    assert imported
    assert not imported - set(baton_serve.__all__)

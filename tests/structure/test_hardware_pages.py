"""The pages of docs/quickstart show commands that exist, tables of the formulas, and what `baton doctor` prints."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton_serve.services.cli import COMMANDS
from baton_serve.services.doctor.cards import check_cards
from baton_serve.services.doctor.device_findings import device_findings
from baton_serve.services.doctor.device_probe import DeviceFacts, ProbeFacts
from baton_serve.services.doctor.findings import DoctorReport, Finding
from baton_serve.services.doctor.kernel_findings import KernelFacts, kernel_finding
from baton_serve.services.doctor.limits import check_limits
from baton_serve.services.doctor.main import as_text
from tests.unit.doctor.machine import add_card
from tools.sizing import fits_table

ROOT = Path(__file__).resolve().parents[2]
PAGES = {path.stem: path for path in (ROOT / "docs" / "quickstart").glob("*.md")}
MAX_LINES = 40
FEATURES = {"triton": True, "graphs": True, "distributed": True}
B580 = DeviceFacts(0, "Intel(R) Arc(TM) B580 Graphics", int(11.3 * 2**30), 12e9, 12e9)
H100 = DeviceFacts(0, "NVIDIA H100 80GB HBM3", 85017493504, 54.556e9, 54.544e9)
"""The output of `device_probe` on an H100 on 2026-11-23."""


def arc(root: Path) -> Iterator[Finding]:
    add_card(root, 0)
    yield from check_cards(root)
    yield from device_findings(ProbeFacts("2.13.0+xpu", "xpu", FEATURES, [B580], []))


def cuda(root: Path) -> Iterator[Finding]:
    yield from device_findings(ProbeFacts("2.11.0+cu130", "cuda", FEATURES, [H100], []))
    yield kernel_finding(KernelFacts("decode attention", "triton", 0.00225225))


def cpu(root: Path) -> Iterator[Finding]:
    yield from check_cards(root)
    for folder in ("dev/shm", "proc", "bin"):
        (root / folder).mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {24 << 20} kB\nMemAvailable: {23 << 20} kB\n")
    yield from check_limits(root)
    yield from device_findings(ProbeFacts("2.13.0+cpu", "cpu", {**FEATURES, "graphs": False}, [], []))


def wsl(root: Path) -> Iterator[Finding]:
    (root / "dev").mkdir()
    (root / "dev/dxg").touch()
    yield from check_cards(root)


MACHINES = {"arc": arc, "cuda": cuda, "cpu": cpu, "wsl": wsl}


def shown_by(page: str) -> list[str]:
    """Return the lines of `baton doctor` on a page."""
    lines = PAGES[page].read_text().splitlines()
    return [line for line in lines if re.match(r"(ok|note|WARNING|PROBLEM) +[\w ]+: |no problems$", line)]


def without_values(line: str) -> str:
    """Return a line of an observed output without the numbers and the path of the machine."""
    return re.sub(r"/\S+/g\+\+", "COMPILER", re.sub(r"\d+(\.\d+)?", "N", line))


def test_there_is_a_page_for_each_kind_of_hardware() -> None:
    assert set(PAGES) == set(MACHINES)


@pytest.mark.parametrize("page", MACHINES)
def test_a_page_has_at_most_40_lines(page: str) -> None:
    assert len(PAGES[page].read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("page", MACHINES)
def test_the_output_of_the_doctor_on_a_page_is_what_it_prints(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page == "cpu":
        (tmp_path / "tools").mkdir()
        compiler = tmp_path / "tools" / "g++"
        compiler.touch(mode=0o755)
        monkeypatch.setenv("PATH", str(compiler.parent))
    printed = as_text(DoctorReport("0.1.0", True, list(MACHINES[page](tmp_path)))).splitlines()
    observed = shown_by(page)
    if page == "cpu":
        printed, observed = [*map(without_values, printed)], [*map(without_values, observed)]
    assert observed and not set(observed) - set(printed)


@pytest.mark.parametrize("page", MACHINES)
def test_the_commands_of_a_page_exist(page: str) -> None:
    text = PAGES[page].read_text()
    assert set(re.findall(r"\bbaton (\w+)", " ".join(re.findall(r"`[^`]+`|```.*?```", text, re.DOTALL)))) <= {*COMMANDS}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in re.findall(r"^make ([^#&\n]*)", text, re.MULTILINE):
        assert {word for word in command.split() if re.fullmatch(r"[a-z-]+", word)} <= targets


def test_the_models_that_fit_an_arc_card_are_those_of_the_formula() -> None:
    assert fits_table() in PAGES["arc"].read_text()


def test_the_arc_page_says_that_its_output_was_not_observed() -> None:
    text = " ".join(PAGES["arc"].read_text().split())
    assert "not observed on a card" in text and "Nobody has run Baton on an Arc card" in text

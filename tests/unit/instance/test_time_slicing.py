"""When a step may begin where others compute on the same cores, over real shared memory and a clock of its own."""

import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from baton_serve.services.instance.cpu_sharing import time_slicing as module
from baton_serve.services.instance.cpu_sharing.time_slice_memory import (
    COMPUTES_UNTIL,
    MAX_PROCESSES,
    PROMPTS_UNTIL,
    WORDS_PER_ROW,
    TimeSliceMemory,
)
from baton_serve.services.instance.cpu_sharing.time_slicing import (
    MAX_WAIT_S,
    BoundedTimeSlicer,
    NoTimeSlicing,
    YieldingTimeSlicer,
    make_time_slicer,
    pause_s,
)
from baton_serve.services.instance.errors import StartFailed
from baton_serve.services.instance.settings import InstanceSettings


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return int(self.now * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr("baton_serve.services.instance.cpu_sharing.time_slice_memory.time", made)
    return made


class Others:
    """Writes a row of shared memory as another process does."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), MAX_PROCESSES * WORDS_PER_ROW * 8)).cast("q")

    def prompts(self, until_s: float) -> None:
        self._words[2 * WORDS_PER_ROW + PROMPTS_UNTIL] = int(until_s * 1e9)

    def own(self, word: int) -> int:
        """In the row of this process, the first one."""
        return self._words[word]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "turns"


def test_steps_follow_one_another_while_no_prompt_waits(path: Path, clock: Clock) -> None:
    turns = BoundedTimeSlicer(TimeSliceMemory(str(path)), 0.25)
    turns.begin()
    clock.now += 0.02
    turns.end()
    assert turns.wait_s() == 0


def test_while_prompts_wait_steps_take_their_share_of_the_time(path: Path, clock: Clock) -> None:
    turns = BoundedTimeSlicer(TimeSliceMemory(str(path)), 0.25)
    Others(path).prompts(clock.now + 5)
    turns.begin()
    clock.now += 0.02
    turns.end()
    assert turns.wait_s() == pytest.approx(0.06)
    clock.now += 0.061
    assert turns.wait_s() == 0


def test_a_wait_ends_with_the_prompts_or_without_reports_of_them(path: Path, clock: Clock) -> None:
    turns, others = BoundedTimeSlicer(TimeSliceMemory(str(path)), 0.1), Others(path)
    others.prompts(clock.now + 0.05)
    turns.begin()
    clock.now += 0.02
    turns.end()
    assert turns.wait_s() > 0
    clock.now += 0.04
    assert turns.wait_s() == 0
    others.prompts(clock.now + 5)
    assert turns.wait_s() > 0
    others.prompts(0)
    assert turns.wait_s() == 0


def test_a_wait_is_bounded_however_long_the_step() -> None:
    assert pause_s(0.02, 0.2) == pytest.approx(0.08)
    assert pause_s(3.0, 0.2) == MAX_WAIT_S
    assert pause_s(3.0, 1.0) == 0


def test_a_turn_is_announced_with_its_end_and_taken_back(path: Path, clock: Clock) -> None:
    turns = BoundedTimeSlicer(TimeSliceMemory(str(path)), 0.25)
    others = Others(path)
    turns.begin()
    assert clock.now < others.own(COMPUTES_UNTIL) / 1e9 <= clock.now + module.MAX_SLICE_S
    turns.end()
    assert others.own(COMPUTES_UNTIL) == 0


def test_prefill_reports_prompts_until_it_is_idle(path: Path, clock: Clock) -> None:
    memory, reported = TimeSliceMemory(str(path)), list[tuple[int, int, int]]()
    turns, others = YieldingTimeSlicer(memory, lambda *rows: reported.append(rows)), Others(path)
    assert turns.wait_s() == 0
    for _ in range(2):
        turns.begin()
        turns.end()
    assert reported == [(memory.address, MAX_PROCESSES, WORDS_PER_ROW)]
    assert others.own(PROMPTS_UNTIL) > clock.now * 1e9
    turns.rest()
    assert others.own(PROMPTS_UNTIL) == 0


def test_a_process_has_a_row_of_its_own(path: Path) -> None:
    first = TimeSliceMemory(str(path))
    child = (
        "import sys; from baton_serve.services.instance.cpu_sharing.time_slice_memory import *;"
        " memory = TimeSliceMemory(sys.argv[1]);"
        " memory.write(PROMPTS_UNTIL, 600.0); print(memory.is_any(PROMPTS_UNTIL))"
    )
    done = subprocess.run([sys.executable, "-c", child, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert first.is_any(PROMPTS_UNTIL)


def test_the_role_decides_and_a_file_that_cannot_be_used_stops_the_start(path: Path) -> None:
    def settings(core_turns: str | None) -> InstanceSettings:
        return InstanceSettings(model="/m", core_turns=core_turns)

    assert type(make_time_slicer(settings(None), "prefill", print)) is NoTimeSlicing
    assert isinstance(make_time_slicer(settings(str(path)), "prefill", print), YieldingTimeSlicer)
    assert isinstance(make_time_slicer(settings(str(path)), "decode", print), BoundedTimeSlicer)
    with pytest.raises(StartFailed, match="--core-turns"):
        make_time_slicer(settings(str(path / "no" / "folder")), "decode", print)

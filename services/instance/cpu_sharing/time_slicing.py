"""When an instance computes its next step, where others compute on the same cores (`--core-turns`).

Prefill pauses while another instance computes a step. That one, in return, leaves most of the time to prefill while
prompts wait there: its steps come at a bounded distance instead of one after another, and each has more sequences.
Decisions are pure; `TimeSliceMemory` tells the others.
"""

import time
from collections.abc import Callable
from typing import Protocol

from baton_serve.contracts.instance import Role
from baton_serve.services.instance.cpu_sharing.time_slice_memory import (
    COMPUTES_UNTIL,
    MAX_PROCESSES,
    PROMPTS_UNTIL,
    WORDS_PER_ROW,
    TimeSliceMemory,
    TimeSliceMemoryError,
)
from baton_serve.services.instance.errors import StartFailed
from baton_serve.services.instance.settings import InstanceSettings

YieldToOthers = Callable[[int, int, int], object]
"""`engine.kernels.cpu.time_slicing.yield_to_processes`."""

MAX_WAIT_S = 0.2
"""Whatever the share: so much is added to a gap between two tokens at most."""
MIN_SLICE_S, MAX_SLICE_S = 0.05, 0.25
"""For how long others pause at most if this process dies, or its step takes longer than steps before."""
PROMPT_SLICE_S = 5.0
"""For how long a step that computes prompts is believed to go on if nothing else is heard of it."""


class TimeSlicer(Protocol):
    """Called in the engine's thread."""

    def wait_s(self) -> float:
        """How long the next step should wait from now."""
        ...

    def begin(self) -> None:
        """A step begins."""
        ...

    def end(self) -> None:
        """It has ended."""
        ...

    def rest(self) -> None:
        """There is nothing to do."""
        ...


class NoTimeSlicing:
    """The cores are this instance's own."""

    def wait_s(self) -> float:
        return 0.0

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass

    def rest(self) -> None:
        pass


class YieldingTimeSlicer(NoTimeSlicing):
    """Of prefill. Its kernels look for others' turns themselves, once they are told where."""

    def __init__(self, memory: TimeSliceMemory, yield_to_others: YieldToOthers) -> None:
        self._memory = memory
        self._yield_to_others = yield_to_others
        self._has_announced = False

    def begin(self) -> None:
        if not self._has_announced:
            self._has_announced = True
            self._yield_to_others(self._memory.address, MAX_PROCESSES, WORDS_PER_ROW)
        self._memory.write(PROMPTS_UNTIL, PROMPT_SLICE_S)

    def rest(self) -> None:
        self._memory.write(PROMPTS_UNTIL, 0.0)


class BoundedTimeSlicer(NoTimeSlicing):
    """Of the others. `share`: of the time, for steps while prompts wait."""

    def __init__(self, memory: TimeSliceMemory, share: float) -> None:
        self._memory = memory
        self._share = share
        self._usual_s = MAX_SLICE_S
        self._began = self._ended = 0.0

    def wait_s(self) -> float:
        due = self._ended + pause_s(self._ended - self._began, self._share)
        wait = due - time.monotonic()
        return wait if wait > 0 and self._memory.is_any(PROMPTS_UNTIL) else 0.0

    def begin(self) -> None:
        self._began = time.monotonic()
        self._memory.write(COMPUTES_UNTIL, min(max(4 * self._usual_s, MIN_SLICE_S), MAX_SLICE_S))

    def end(self) -> None:
        self._memory.write(COMPUTES_UNTIL, 0.0)
        self._ended = time.monotonic()
        self._usual_s += (self._ended - self._began - self._usual_s) / 8


def pause_s(step_s: float, share: float) -> float:
    """After a step that took so long."""
    return min(step_s * (1 - share) / share, MAX_WAIT_S)


def core_turns(settings: InstanceSettings, role: Role, yield_to_others: YieldToOthers) -> TimeSlicer:
    """Call in the process that computes. Raises `StartFailed`."""
    if not settings.core_turns:
        return NoTimeSlicing()
    try:
        memory = TimeSliceMemory(settings.core_turns)
    except TimeSliceMemoryError as exc:
        raise StartFailed(f"--core-turns {exc}") from exc
    return (
        YieldingTimeSlicer(memory, yield_to_others)
        if role == "prefill"
        else BoundedTimeSlicer(memory, settings.core_turns_share)
    )

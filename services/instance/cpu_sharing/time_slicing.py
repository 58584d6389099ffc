"""Decides when an instance may compute its next step if others compute on the same cores (`--core-turns`).

A prefill instance pauses while another instance computes a step. In return, the other instances leave most of the time
to prefill while prompts wait there: they space their steps out, so that each step has more sequences. The decisions are
pure; `TimeSliceMemory` shares them with the other processes.
"""

import time
from collections.abc import Callable
from typing import Protocol

from baton_serve.contracts.instance import Role
from baton_serve.services.common.cpus.allocation import BACKGROUND_ROLES
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
"""Longest pause between two steps, in seconds, whatever the share: it is added to the inter-token latency."""
MIN_SLICE_S, MAX_SLICE_S = 0.05, 0.25
"""Lower and upper bound, in seconds, of how long a step announces to compute. Prefill instances pause at most this long
if this process dies within the step, or if the step takes longer than earlier ones."""
PROMPT_SLICE_S = 5.0
"""Seconds for which a step with prompts announces itself. It expires if the process dies without clearing it."""


class TimeSlicer(Protocol):
    """Coordinates the steps of one engine with those of other processes that compute on the same CPU cores. Called in
    the engine thread only.
    """

    def wait_s(self) -> float:
        """Return for how many seconds the next step should wait from now; 0 if it may start."""
        ...

    def begin(self) -> None:
        """Announce to the other processes that this engine starts a step."""
        ...

    def end(self) -> None:
        """Announce to the other processes that this engine's step has ended."""
        ...

    def rest(self) -> None:
        """Announce that this engine has no work left, so that other processes need not pause for it."""
        ...


class NoTimeSlicing:
    """A `TimeSlicer` that never makes a step wait, for an instance whose CPU cores belong to it alone."""

    def wait_s(self) -> float:
        return 0.0

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass

    def rest(self) -> None:
        pass


class YieldingTimeSlicer(NoTimeSlicing):
    """The `TimeSlicer` of a prefill instance: its CPU kernels pause while another process on the same cores computes a
    step.
    """

    def __init__(self, memory: TimeSliceMemory, yield_to_others: YieldToOthers) -> None:
        self._memory = memory
        self._yield_to_others = yield_to_others
        self._has_announced = False

    def begin(self) -> None:
        """Announce that this process computes prompts. Before the first step, also make the CPU kernels pause for other
        processes.
        """
        # Not in __init__: this object is made before the engine thread has loaded the kernel library.
        if not self._has_announced:
            self._has_announced = True
            self._yield_to_others(self._memory.address, MAX_PROCESSES, WORDS_PER_ROW)
        self._memory.write(PROMPTS_UNTIL, PROMPT_SLICE_S)

    def rest(self) -> None:
        self._memory.write(PROMPTS_UNTIL, 0.0)


class BoundedTimeSlicer(NoTimeSlicing):
    """The `TimeSlicer` of decode and unified instances. While prompts wait on a prefill instance on the same cores,
    their steps take at most the fraction `share` of the time.
    """

    def __init__(self, memory: TimeSliceMemory, share: float) -> None:
        self._memory = memory
        self._share = share
        self._usual_s = MAX_SLICE_S
        self._began = self._ended = 0.0

    def wait_s(self) -> float:
        """Return how many seconds are left of the pause after the last step; 0 while no prefill instance on the same
        cores has prompts.
        """
        due = self._ended + pause_s(self._ended - self._began, self._share)
        wait = due - time.monotonic()
        # Waiting helps only while a prefill instance has prompts to compute.
        return wait if wait > 0 and self._memory.is_any(PROMPTS_UNTIL) else 0.0

    def begin(self) -> None:
        """Announce that this process computes a step, so that prefill instances on the same cores pause."""
        self._began = time.monotonic()
        # Four times the usual duration: steps vary, and an announcement that expires within the step lets prefill take
        # the cores away from it.
        self._memory.write(COMPUTES_UNTIL, min(max(4 * self._usual_s, MIN_SLICE_S), MAX_SLICE_S))

    def end(self) -> None:
        """Announce that the step has ended, and update the average duration of a step."""
        self._memory.write(COMPUTES_UNTIL, 0.0)
        self._ended = time.monotonic()
        # Exponential moving average over about eight steps.
        self._usual_s += (self._ended - self._began - self._usual_s) / 8


def pause_s(step_s: float, share: float) -> float:
    """Return the pause in seconds after a step of `step_s` seconds, so that steps take at most the fraction `share` of
    the time.

    It is at most `MAX_WAIT_S`, even if steps then take more than their share.
    """
    return min(step_s * (1 - share) / share, MAX_WAIT_S)


def make_time_slicer(settings: InstanceSettings, role: Role, yield_to_others: YieldToOthers) -> TimeSlicer:
    """Return the object by which an instance of `role` takes turns on shared CPU cores, as `--core-turns` says.
    `yield_to_others` makes the CPU kernels pause. Call it in the process that computes the model.

    Raises `StartFailed` if the shared file cannot be used.
    """
    if not settings.core_turns:
        return NoTimeSlicing()
    try:
        memory = TimeSliceMemory(settings.core_turns)
    except TimeSliceMemoryError as exc:
        raise StartFailed(
            f"--core-turns: {exc}; name a file that can be created in shared memory, such as /dev/shm/baton"
        ) from exc
    return (
        YieldingTimeSlicer(memory, yield_to_others)
        if role in BACKGROUND_ROLES
        else BoundedTimeSlicer(memory, settings.core_turns_share)
    )

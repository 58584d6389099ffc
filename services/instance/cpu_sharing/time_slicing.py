"""When an instance computes its next step, where others compute on the same cores (`--core-turns`).

Prefill pauses while another instance computes a step. That one, in return, leaves most of the time to prefill while
prompts wait there: its steps come at a bounded distance instead of one after another, and each has more sequences.
Decisions are pure; `TurnMemory` tells the others.
"""

import time
from collections.abc import Callable
from typing import Protocol

from baton_serve.contracts.instance import Role
from baton_serve.services.instance.cpu_sharing.shared_turns import (
    COMPUTES_UNTIL,
    PROMPTS_UNTIL,
    ROWS,
    WIDTH,
    TurnMemory,
    TurnMemoryError,
)
from baton_serve.services.instance.errors import StartFailed
from baton_serve.services.instance.settings import InstanceSettings

GiveWay = Callable[[int, int, int], object]
"""`engine.kernels.cpu.time_slicing.give_way_to`."""

LONGEST_WAIT_S = 0.2
"""Whatever the share: so much is added to a gap between two tokens at most."""
SHORTEST_TURN_S, LONGEST_TURN_S = 0.05, 0.25
"""For how long others pause at most if this process dies, or its step takes longer than steps before."""
PROMPTS_FOR_S = 5.0
"""For how long a step that computes prompts is believed to go on if nothing else is heard of it."""


class CoreTurns(Protocol):
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


class NoTurns:
    """The cores are this instance's own."""

    def wait_s(self) -> float:
        return 0.0

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass

    def rest(self) -> None:
        pass


class GivesWay(NoTurns):
    """Of prefill. Its kernels look for others' turns themselves, once they are told where."""

    def __init__(self, memory: TurnMemory, give_way: GiveWay) -> None:
        self._memory = memory
        self._give_way = give_way
        self._is_told = False

    def begin(self) -> None:
        if not self._is_told:
            self._is_told = True
            self._give_way(self._memory.address, ROWS, WIDTH)
        self._memory.write(PROMPTS_UNTIL, PROMPTS_FOR_S)

    def rest(self) -> None:
        self._memory.write(PROMPTS_UNTIL, 0.0)


class TakesTurns(NoTurns):
    """Of the others. `share`: of the time, for steps while prompts wait."""

    def __init__(self, memory: TurnMemory, share: float) -> None:
        self._memory = memory
        self._share = share
        self._usual_s = LONGEST_TURN_S
        self._began = self._ended = 0.0

    def wait_s(self) -> float:
        due = self._ended + pause_s(self._ended - self._began, self._share)
        wait = due - time.monotonic()
        return wait if wait > 0 and self._memory.is_any(PROMPTS_UNTIL) else 0.0

    def begin(self) -> None:
        self._began = time.monotonic()
        self._memory.write(COMPUTES_UNTIL, min(max(4 * self._usual_s, SHORTEST_TURN_S), LONGEST_TURN_S))

    def end(self) -> None:
        self._memory.write(COMPUTES_UNTIL, 0.0)
        self._ended = time.monotonic()
        self._usual_s += (self._ended - self._began - self._usual_s) / 8


def pause_s(step_s: float, share: float) -> float:
    """After a step that took so long."""
    return min(step_s * (1 - share) / share, LONGEST_WAIT_S)


def core_turns(settings: InstanceSettings, role: Role, give_way: GiveWay) -> CoreTurns:
    """Call in the process that computes. Raises `StartFailed`."""
    if not settings.core_turns:
        return NoTurns()
    try:
        memory = TurnMemory(settings.core_turns)
    except TurnMemoryError as exc:
        raise StartFailed(f"--core-turns {exc}") from exc
    return GivesWay(memory, give_way) if role == "prefill" else TakesTurns(memory, settings.core_turns_share)

"""Decides whether an implementation of one operation equals its plain-torch twin on this device, and times it.

It is for kernels what the ladder is for transports: an implementation is used only after it has computed the right
numbers here, and the twin serves instead of one that is wrong. Each one runs twice, because a race or memory that was
not initialized may be right once. This module knows no operation; `operations.py` lists them.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import torch
from torch import Tensor

from baton_serve.contracts.instance import KernelVerdict
from baton_serve.engine import device as devices

logger = logging.getLogger(__name__)

K = TypeVar("K")

RUNS = 2
"""How often each implementation must be right."""
TIMED_RUNS = 5
"""How often an operation runs to measure its time."""
WORTHWHILE = 0.9
"""A later implementation replaces an earlier one only below this fraction of its time: times vary."""
TWIN = "plain torch"
"""The name of the twin among the implementations."""
REMEDY = "please report it: baton doctor --report"


@dataclass(frozen=True, slots=True)
class Operation(Generic[K]):
    """One comparison: an operation with fixed random inputs, which implementations of the interface `K` compute."""

    name: str
    shape: str
    run: Callable[[K], Sequence[Tensor] | None]
    """Compute the operation, without changing its inputs. None: this implementation leaves it to other operations."""
    tolerance: float
    """Largest right difference, as a fraction of the twin's largest number."""


@dataclass(frozen=True, slots=True)
class KernelCandidate(Generic[K]):
    """An implementation of the interface `K` that may be used if its results are right. `make` returns it, or raises
    if, for example, its package does not fit the device.
    """

    name: str
    make: Callable[[], K]
    only: frozenset[str] = frozenset()
    """The operations that it has; empty: all."""
    is_last: bool = False
    """It is chosen only if no other is right, however fast it is. Graphs cannot capture such a one."""


@dataclass(frozen=True, slots=True)
class Made(Generic[K]):
    """A candidate after its `make` was called: its implementation, or the reason why there is none."""

    candidate: KernelCandidate[K]
    kernels: K | None
    error: str = ""


class Prover:
    """Compares kernels with plain torch on one device. With `is_timed`, the fastest of the right implementations is
    chosen; otherwise the first.
    """

    def __init__(self, device: torch.device, *, is_timed: bool) -> None:
        self._device = device
        self._is_timed = is_timed

    def prove(self, operation: Operation[K], twin: K, candidates: Sequence[Made[K]]) -> list[KernelVerdict]:
        """Compare each of `candidates`, in order of preference, with `twin`, the implementation in plain torch. Return
        their verdicts, at most one of which is marked as chosen. Candidates that do not have the operation get no
        verdict.
        """
        having = [one for one in candidates if not one.candidate.only or operation.name in one.candidate.only]
        if not having:
            return []
        expected = operation.run(twin)
        assert expected is not None, f"the twin does not compute {operation.name}"
        judged = [(one, verdict) for one in having if (verdict := self._judge(operation, expected, one)) is not None]
        if self._is_timed:
            right = [one for one, verdict in judged if verdict.is_right]
            times = {one.candidate.name: self._time(operation, one.kernels) for one in right if one.kernels is not None}
            judged = [
                (one, msgspec.structs.replace(verdict, time_s=times.get(verdict.candidate))) for one, verdict in judged
            ]
        return _choose(judged)

    def _judge(self, operation: Operation[K], expected: Sequence[Tensor], one: Made[K]) -> KernelVerdict | None:
        name, made = one.candidate.name, one.kernels
        if made is None:
            return KernelVerdict(operation.name, operation.shape, name, is_right=False, error=one.error)
        largest = 0.0
        try:
            for _ in range(RUNS):
                self._spoil_free_memory(expected)
                results = operation.run(made)
                if results is None:
                    return None
                largest = max([largest, *(difference(*pair) for pair in zip(results, expected, strict=True))])
        # Whatever a compiler, a driver or a library raises: the twin serves.
        except Exception as exc:  # noqa: BLE001 - drivers and compilers raise whatever they want
            return KernelVerdict(operation.name, operation.shape, name, is_right=False, error=_one_line(exc))
        return KernelVerdict(
            operation.name,
            operation.shape,
            name,
            is_right=largest <= operation.tolerance,
            difference=largest if math.isfinite(largest) else None,
        )

    def _spoil_free_memory(self, like: Sequence[Tensor]) -> None:
        """Fill memory of the sizes of `like` with NaN, and free it. The allocator gives it to the next results, so that
        a kernel that leaves a part of its result unwritten, or adds to it, returns NaN.
        """
        spoiled = [torch.full_like(one, math.nan) for one in like if one.is_floating_point() and one.element_size() > 1]
        del spoiled

    def _time(self, operation: Operation[K], made: K) -> float:
        """Return the shortest of several measured times of the operation with the implementation `made`, in seconds."""
        times = []
        for _ in range(TIMED_RUNS):
            devices.synchronize(self._device)
            started = time.perf_counter()
            operation.run(made)
            devices.synchronize(self._device)
            times.append(time.perf_counter() - started)
        return min(times)


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference between two tensors as a fraction of the largest number of `expected`; infinity if
    there is NaN, or if the shapes differ.
    """
    if found.shape != expected.shape:
        return math.inf
    a, b = (part.detach().to("cpu", torch.float64) for part in (found, expected))
    largest = float((a - b).abs().max()) / max(float(b.abs().max()), 1e-30)
    # Only NaN differs from itself.
    return largest if largest == largest else math.inf


def make_candidates(candidates: Iterable[KernelCandidate[K]]) -> list[Made[K]]:
    """Call `make` of each candidate. If it raises, the result has the reason instead of an implementation."""
    made: list[Made[K]] = []
    for one in candidates:
        try:
            made.append(Made(one, one.make()))
        except Exception as exc:  # noqa: BLE001 - importing a package may raise whatever it wants
            made.append(Made(one, None, _one_line(exc)))
    return made


def warn_of_wrong(verdicts: Sequence[KernelVerdict]) -> None:
    """Log a warning for each implementation that is not right, with the name of the one that is used instead."""
    chosen = {verdict.operation: verdict.candidate for verdict in verdicts if verdict.is_chosen}
    for verdict in verdicts:
        if not verdict.is_right:
            logger.warning(
                "the kernel for %s of %s is wrong on this device and is not used: with %s %s. %s serves instead; %s",
                verdict.operation,
                verdict.candidate,
                verdict.shape,
                verdict.describe(),
                chosen.get(verdict.operation, TWIN),
                REMEDY,
            )


def _choose(judged: Sequence[tuple[Made[K], KernelVerdict]]) -> list[KernelVerdict]:
    """Return the verdicts of one operation with the implementation to use marked: the first right one, unless a later
    one is at least 10 % faster.
    """
    best: KernelVerdict | None = None
    for one, verdict in judged:
        is_better = best is None or (not one.candidate.is_last and _is_faster(verdict, best))
        if verdict.is_right and is_better:
            best = verdict
    return [msgspec.structs.replace(verdict, is_chosen=verdict is best) for _, verdict in judged]


def _is_faster(verdict: KernelVerdict, best: KernelVerdict) -> bool:
    return verdict.time_s is not None and best.time_s is not None and verdict.time_s < WORTHWHILE * best.time_s


def _one_line(exc: BaseException) -> str:
    return (f"{type(exc).__name__}: {exc}".splitlines() or [type(exc).__name__])[0][:300]

"""Which transport carries the blocks of one pair of instances, and when another one is tried. No I/O, no clock.

Rules: what needs a proof is used only after a probe gave one; what failed is tried again by a probe, after an interval
that grows; of what one probe measured the fastest is used; where nothing is left, what was demoted is tried again.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

UNSEEN = ("memory",)
"""Transports that join nodes of one process: no probe can try them."""

ProbeOutcome = Literal["proved", "wrong bytes", "deadline", "crashed", "unavailable", "skipped"]
"""Of a probe. `skipped`: it ended before this one's turn came."""
Choice = Literal["rule", "proved", "forced", "fallback", "none"]
"""Why a pair uses its transport: first of those that need no proof; fastest in a probe; told by the operator; what
comes before it was demoted or could not be had; nothing is left."""


class Rung(msgspec.Struct, frozen=True, array_like=True):
    """A transport, and which dialect of it where it has several."""

    transport: Annotated[str, Meta(min_length=1, max_length=64)]
    dialect: Annotated[str, Meta(max_length=64)] = ""

    def __str__(self) -> str:
        return f"{self.transport} by {self.dialect}" if self.dialect else self.transport


class Verdict(msgspec.Struct, frozen=True):
    """What a probe found out about one rung."""

    rung: Rung
    outcome: ProbeOutcome
    bytes_per_second: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LadderLimits:
    retry_s: float = 30.0
    """First interval until what failed is probed again; it doubles."""
    max_retry_s: float = 3600.0
    """The longest one. What served for so long since starts with the shortest again."""
    busy_retry_s: float = 2.0
    last_resort_s: float = 1.0
    """Where nothing else is left, what was demoted rests for so long."""
    gain: float = 1.1
    """So many times faster must another transport be."""


@dataclass(slots=True)
class Standing:
    is_usable: bool
    needs_proof: bool
    trouble: str = ""
    detail: str = ""
    bytes_per_second: float = 0.0
    """In the last probe; 0: there was none."""
    failures: int = 0
    failed_at: float = 0.0
    retry_at: float = 0.0
    served_since: float = 0.0


class Ladder:
    """For one consumer and one process at the other end. `rungs`: what both ends can do, best first.

    `unproved`: those that need a probe. `forced`: by what the operator told to use a transport. `notes`: what is not
    among the rungs, and why.
    """

    def __init__(
        self,
        rungs: Sequence[Rung],
        *,
        unproved: Collection[str] = (),
        forced: Mapping[str, str] | None = None,
        notes: Sequence[str] = (),
        limits: LadderLimits | None = None,
    ) -> None:
        self._standings = {rung: Standing(rung.transport not in unproved, rung.transport in unproved) for rung in rungs}
        self._forced = forced or {}
        self._notes = list(notes)
        self._limits = limits or LadderLimits()
        self._best: Rung | None = None
        self.current: Rung | None = None
        """In use."""

    def order(self, now: float) -> list[Rung]:
        """What a connection may try now, best first."""
        usable = [rung for rung, standing in self._standings.items() if standing.is_usable]
        if not usable:
            rested = now - self._limits.last_resort_s
            return [r for r, s in self._standings.items() if not s.needs_proof and s.failed_at <= rested]
        return sorted(usable, key=lambda rung: rung != self._best)

    def attached(self, rung: Rung, now: float, detail: str = "") -> None:
        """Blocks go this way from now on. `detail` is told with it."""
        standing = self._standings[rung]
        standing.detail = detail
        standing.is_usable, standing.trouble, standing.served_since = True, "", now
        self.current = rung

    def missing(self, rung: Rung, reason: str, now: float) -> None:
        """The instances themselves could not be joined this way."""
        self._bar(rung, reason, now)

    def demoted(self, rung: Rung, reason: str, now: float) -> None:
        """It was in use, and damaged blocks or broke."""
        self._bar(rung, f"demoted, {reason}", now)

    def due(self, now: float) -> list[Rung]:
        """What a probe should try now, with what is in use to compare; empty: nothing."""
        waiting = [rung for rung, standing in self._standings.items() if _is_due(rung, standing, now)]
        if not waiting or self.current is None or self.current.transport in UNSEEN:
            return waiting
        return [self.current, *(rung for rung in waiting if rung != self.current)]

    def postponed(self, now: float) -> None:
        """No probe could be had just now."""
        for standing in self._standings.values():
            if not standing.is_usable:
                standing.retry_at = max(standing.retry_at, now + self._limits.busy_retry_s)

    def probed(self, verdicts: Sequence[Verdict], now: float) -> Rung | None:
        """The results of one probe. Returns the rung to move to, if any."""
        proved: dict[Rung, float] = {}
        for verdict in verdicts:
            standing = self._standings.get(verdict.rung)
            if standing is None:
                continue
            if verdict.outcome == "proved":
                standing.is_usable, standing.trouble = True, ""
                proved[verdict.rung] = standing.bytes_per_second = verdict.bytes_per_second
            elif verdict.rung == self.current:
                standing.bytes_per_second = 0.0  # blocks that arrive through it are verified: it stays
            elif verdict.outcome == "skipped":
                standing.retry_at = now + self._limits.retry_s
            else:
                self._bar(verdict.rung, f"probe: {verdict.outcome}{verdict.reason and f', {verdict.reason}'}", now)
        return self._move_to(proved)

    def choice(self) -> Choice:
        if self.current is None:
            return "none"
        if self.current.transport in self._forced:
            return "forced"
        if self.current == self._best:
            return "proved"
        for rung, standing in self._standings.items():
            if rung == self.current:
                break
            if not standing.is_usable and not standing.needs_proof and rung.transport not in UNSEEN:
                return "fallback"
        return "rule"

    def why(self) -> list[str]:
        """A line for each rung that is used or was tried, best first, and for what both ends lack."""
        lines = [f"{rung.transport}: {said}" for rung in self._standings if (said := self._said(rung))]
        return lines + self._notes

    def speed(self) -> float:
        """Bytes per second of what is in use, in the last probe; 0: there was none."""
        return self._standings[self.current].bytes_per_second if self.current is not None else 0.0

    def _move_to(self, proved: Mapping[Rung, float]) -> Rung | None:
        if not proved or list(proved) == [self.current]:
            return None
        best = max(proved, key=lambda rung: proved[rung])
        here = proved.get(self.current, 0.0) if self.current is not None else 0.0
        if self.current in proved and proved[best] <= here * self._limits.gain:
            self._best = self.current
            return None
        self._best = best
        return best

    def _bar(self, rung: Rung, trouble: str, now: float) -> None:
        standing, limits = self._standings[rung], self._limits
        if standing.served_since and now - standing.served_since > limits.max_retry_s:
            standing.failures = 0
        standing.failures += 1
        interval = min(limits.retry_s * 2.0 ** (standing.failures - 1), limits.max_retry_s)
        standing.is_usable, standing.trouble, standing.served_since = False, trouble, 0.0
        standing.failed_at, standing.retry_at = now, now + interval
        if self._best == rung:
            self._best = None
        if self.current == rung:
            self.current = None

    def _said(self, rung: Rung) -> str:
        standing, by = self._standings[rung], f"by {rung.dialect}, " if rung.dialect else ""
        speed = f", {standing.bytes_per_second / 1e9:.1f} GB/s in a probe" if standing.bytes_per_second else ""
        if rung == self.current:
            forced = self._forced.get(rung.transport, "")
            return f"in use{by and f' {by[:-2]}'}{standing.detail}{speed}{forced and f', forced by {forced}'}"
        if not standing.is_usable:
            return by + (standing.trouble or "not proved yet")
        return f"{by}not the fastest{speed}" if speed else ""


def _is_due(rung: Rung, standing: Standing, now: float) -> bool:
    return not standing.is_usable and standing.retry_at <= now and rung.transport not in UNSEEN

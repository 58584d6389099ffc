"""Decides which transport two instances use (order, probes, speed), and when another one is tried.

The rules: A transport that needs a proof is used only after a probe has proved it. A transport that failed is probed
again after an interval that grows with each failure. Among transports that one probe has measured, the fastest is used.
If nothing else is left, a demoted transport is tried again. This module is pure: no I/O, no clock.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

UNSEEN = ("memory",)
"""Transports between nodes of one process. A probe runs in processes of its own, so it cannot try them."""

ProbeOutcome = Literal["proved", "wrong bytes", "deadline", "crashed", "unavailable", "skipped"]
"""Result of probing one rung. `skipped` means that the probe ended before it reached this rung."""
Choice = Literal["rule", "proved", "forced", "fallback", "none"]
"""Why a pair uses its transport.

 * `rule`: it is the first in the order of preference that needs no proof.
 * `proved`: it was the fastest in a probe.
 * `forced`: the operator demands it by a setting.
 * `fallback`: the transports before it were demoted or cannot connect the pair.
 * `none`: no transport is left.
"""


class Rung(msgspec.Struct, frozen=True, array_like=True):
    """One entry of a ladder, the list of transports to try: a transport, and its dialect if the
    transport has several.
    """

    transport: Annotated[str, Meta(min_length=1, max_length=64)]
    dialect: Annotated[str, Meta(max_length=64)] = ""

    def __str__(self) -> str:
        return f"{self.transport} by {self.dialect}" if self.dialect else self.transport


class Verdict(msgspec.Struct, frozen=True):
    """The result of probing one rung (a transport with its dialect): whether it works, the measured speed if it does,
    and the reason if it does not.
    """

    rung: Rung
    outcome: ProbeOutcome
    bytes_per_second: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LadderLimits:
    """The intervals between probes in seconds, and the factor by which another transport must be faster before a ladder
    changes to it.
    """

    retry_s: float = 30.0
    """Seconds until a failed rung is probed again; they double with each further failure."""
    max_retry_s: float = 3600.0
    """Upper bound of that interval in seconds. A rung that has served for this long starts again with `retry_s` when it
    fails.
    """
    busy_retry_s: float = 2.0
    """Seconds until the next try if the peer could not run a probe."""
    last_resort_s: float = 1.0
    """Seconds until a demoted rung is used again without a probe if no other rung is left."""
    gain: float = 1.1
    """Factor in speed by which another rung must beat the current one, so that noise in the measurement causes no
    change.
    """


@dataclass(slots=True)
class Standing:
    """The state of one rung (a transport with its dialect) in a ladder: whether it is barred, which means not used
    because it failed, and why; when it may be tried again; and its measured speed. Only its `Ladder` changes it.
    """

    is_usable: bool
    needs_proof: bool
    trouble: str = ""
    """Why the rung is not usable; empty if it is, or if it waits for its first proof."""
    detail: str = ""
    bytes_per_second: float = 0.0
    """Speed in the last probe; 0 without a probe."""
    failures: int = 0
    failed_at: float = 0.0
    retry_at: float = 0.0
    served_since: float = 0.0
    """Time of the last successful attachment; 0 while the rung is barred."""


class Ladder:
    """Chooses among the transports that one consumer process and one producer process have in common. It does no I/O
    and reads no clock: times are passed in seconds.

    `rungs` (transports with their dialects) is ordered by preference, best first. `unproved` names the transports that
    need a probe before use. `forced` maps a transport to the setting by which the operator demands it. `notes` says
    which transports are missing from the rungs and why; `why` repeats it.
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
        """The rung that carries blocks now, or None."""

    def order(self, now: float) -> list[Rung]:
        """Return the rungs (transports with their dialects) that a connection may try at the time `now`, best first.
        Rungs that have failed or still need a first probe are left out, unless nothing else is left.
        """
        usable = [rung for rung, standing in self._standings.items() if standing.is_usable]
        if not usable:
            # Nothing is usable. Rather than fail every fetch until the next probe, use rungs again that need no proof
            # and have rested.
            rested = now - self._limits.last_resort_s
            return [r for r, s in self._standings.items() if not s.needs_proof and s.failed_at <= rested]
        # Sorting is stable: the rung that a probe found fastest comes first, and the others keep the order of
        # preference.
        return sorted(usable, key=lambda rung: rung != self._best)

    def attached(self, rung: Rung, now: float, detail: str = "") -> None:
        """Record that the rung (transport and dialect) carries the blocks from the time `now` on. `detail` is appended
        to the line that `why` returns for it.
        """
        standing = self._standings[rung]
        standing.detail = detail
        standing.is_usable, standing.trouble, standing.served_since = True, "", now
        self.current = rung

    def missing(self, rung: Rung, reason: str, now: float) -> None:
        """Stop using the rung (transport and dialect), because the two instances could not connect by it; `reason` is
        shown to operators. It is used again only after a successful probe; the wait before the next probe grows with
        each failure.
        """
        self._bar(rung, reason, now)

    def demoted(self, rung: Rung, reason: str, now: float) -> None:
        """Stop using the rung (transport and dialect) that carried the blocks until now, because it broke or damaged
        blocks; `reason` is shown to operators. It is used again only after a successful probe.
        """
        self._bar(rung, f"demoted, {reason}", now)

    def due(self, now: float) -> list[Rung]:
        """Return the rungs (transports with their dialects) that a probe should test at the time `now`. The list is
        empty if no rung that has failed or needs a first probe is due.

        The rung in use is among them, so that the speeds can be compared, unless a probe cannot test it.
        """
        waiting = [rung for rung, standing in self._standings.items() if _is_due(rung, standing, now)]
        if not waiting or self.current is None or self.current.transport in UNSEEN:
            return waiting
        # The current rung is probed first: speeds from different probes cannot be compared, since the load may have
        # changed.
        return [self.current, *(rung for rung in waiting if rung != self.current)]

    def postponed(self, now: float) -> None:
        """Delay the next probe by `busy_retry_s` seconds from `now` on, because the peer or this node could not run
        one.
        """
        for standing in self._standings.values():
            if not standing.is_usable:
                standing.retry_at = max(standing.retry_at, now + self._limits.busy_retry_s)

    def probed(self, verdicts: Sequence[Verdict], now: float) -> Rung | None:
        """Apply the results of one probe. Return the rung (transport and dialect) to change to, because it is clearly
        faster or the only one that works, or None to keep the current one.
        """
        proved: dict[Rung, float] = {}
        for verdict in verdicts:
            standing = self._standings.get(verdict.rung)
            # A verdict comes from another process: ignore rungs that are not of this pair.
            if standing is None:
                continue
            if verdict.outcome == "proved":
                standing.is_usable, standing.trouble = True, ""
                proved[verdict.rung] = standing.bytes_per_second = verdict.bytes_per_second
            elif verdict.rung == self.current:
                standing.bytes_per_second = (
                    0.0  # the blocks themselves are verified, so a failed probe does not demote it
                )
            elif verdict.outcome == "skipped":
                standing.retry_at = now + self._limits.retry_s
            else:
                self._bar(verdict.rung, f"probe: {verdict.outcome}{verdict.reason and f', {verdict.reason}'}", now)
        return self._move_to(proved)

    def choice(self) -> Choice:
        """Return why the current rung (transport and dialect) is used, as one of the words of `Choice`, such as
        `proved` or `fallback`; `none` if no rung is in use.
        """
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
        """Return text for operators: one line for each transport that is in use, has failed or was probed, best first,
        then the `notes` that the ladder was created with.
        """
        lines = [f"{rung.transport}: {line}" for rung in self._standings if (line := self._line_of(rung))]
        return lines + self._notes

    def speed(self) -> float:
        """Return the speed of the current transport in its last probe, in bytes/s; 0 if none is in use or it was not
        probed.
        """
        return self._standings[self.current].bytes_per_second if self.current is not None else 0.0

    def _move_to(self, proved: Mapping[Rung, float]) -> Rung | None:
        # If only the current rung was proved, there is nothing to compare: `_best` stays as it is.
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
        # A rung that worked for long and fails once is not punished for its failures of long ago.
        if standing.served_since and now - standing.served_since > limits.max_retry_s:
            standing.failures = 0
        standing.failures += 1
        interval = min(limits.retry_s * 2.0 ** (standing.failures - 1), limits.max_retry_s)
        standing.is_usable, standing.trouble, standing.served_since = False, trouble, 0.0
        standing.failed_at, standing.retry_at = now, now + interval
        # The measurement is outdated: the rung must win a new probe to be preferred again.
        if self._best == rung:
            self._best = None
        if self.current == rung:
            self.current = None

    def _line_of(self, rung: Rung) -> str:
        standing, by = self._standings[rung], f"by {rung.dialect}, " if rung.dialect else ""
        speed = f", {standing.bytes_per_second / 1e9:.1f} GB/s in a probe" if standing.bytes_per_second else ""
        if rung == self.current:
            forced = self._forced.get(rung.transport, "")
            return f"in use{by and f' {by[:-2]}'}{standing.detail}{speed}{forced and f', forced by {forced}'}"
        if not standing.is_usable:
            return by + (standing.trouble or "not proved yet")
        return f"{by}not the fastest{speed}" if speed else ""


def _is_due(rung: Rung, standing: Standing, now: float) -> bool:
    """Return whether the rung (transport and dialect) should be probed at the time `now`: it has failed or needs a
    first probe, the wait after its last failure is over, and a probe can test it.
    """
    return not standing.is_usable and standing.retry_at <= now and rung.transport not in UNSEEN

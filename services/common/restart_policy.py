"""Decides after which delay a process that has died is started again, and when it, or its device, is given up."""

from dataclasses import dataclass, field

MIN_DELAY_S = 0.5
"""Delay before the first restart; it doubles with each further short run."""
MAX_DELAY_S = 15.0
"""Longest delay before a restart."""
MAX_FAILED_STARTS = 5
"""Number of consecutive short runs after which a process that has never become ready is not restarted any more."""
STABLE_LIFE_S = 20.0
"""A process that lived for at least this time was stable: its next restart comes after the shortest delay."""


@dataclass(slots=True)
class RestartPolicy:
    """Decides after which delay a process that has died is started again. There is one object for each process, for all
    its runs. `short_lives` and `failed_starts` count runs in a row; `has_served` is True once the process has become
    ready in any run.
    """

    short_lives: int = 0
    failed_starts: int = 0
    has_served: bool = False

    def next_delay_s(self, *, lived_s: float, has_served: bool) -> float | None:
        """Return the delay before the next start in seconds, or None if the process should not be started again.
        `lived_s` is the duration of the run that has ended, and `has_served` whether the process was ready in that run.
        """
        self.has_served = self.has_served or has_served
        self.short_lives = 1 if lived_s >= STABLE_LIFE_S else self.short_lives + 1
        self.failed_starts = 0 if lived_s >= STABLE_LIFE_S else self.failed_starts + 1
        if self.failed_starts >= MAX_FAILED_STARTS and not self.has_served:
            return None
        # The exponent is bounded, since a process that has served once is restarted without a limit.
        return float(min(MAX_DELAY_S, MIN_DELAY_S * 2 ** min(self.short_lives - 1, 10)))


MAX_HANGS = 3
"""Number of hangs within `HANG_WINDOW_S` after which a device is taken out."""
HANG_WINDOW_S = 1800.0
"""Time in which hangs of a device are counted, in seconds. A hang lasts for up to some minutes until it is noticed, and
the model is loaded between two of them."""


@dataclass(slots=True)
class HangPolicy:
    """Decides when a device is not used any more because processes on it hang repeatedly: no process is started on it
    then. After a single hang a restart helps, for example if the driver has reset the card. A card that hangs at each
    request would make every request on it wait for the time limit of a step.
    """

    _hung_at: dict[str, list[float]] = field(default_factory=dict)

    def must_take_out(self, device: str, now: float) -> bool:
        """Count a hang of `device` at the time `now` in seconds. Return whether it was the third within half an hour,
        so that no process should be started on the device any more.
        """
        recent = [at for at in self._hung_at.get(device, []) if now - at < HANG_WINDOW_S] + [now]
        self._hung_at[device] = recent
        return len(recent) >= MAX_HANGS

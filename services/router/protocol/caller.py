"""Who asks, what may be used in that name, and what was promised. Values only."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One API key's owner. 0 means no limit; a `weight` of 2 gets twice the share of a queue."""

    name: str = "anonymous"
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    tokens_per_day: int = 0
    weight: float = 1.0
    min_priority: int | None = None
    """Least `priority` of its requests, which go the sooner the smaller it is; None: any."""

    @property
    def is_limited(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute or self.tokens_per_day)


ANONYMOUS = Caller()


@dataclass(frozen=True, slots=True)
class Slo:
    """Longest time to the first token, and between tokens. None: whatever it takes."""

    ttft_s: float | None = None
    itl_s: float | None = None


NO_SLO = Slo()

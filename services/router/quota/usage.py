"""What each caller used in this minute and this day, against the limits of its key. Pure: wall-clock time is passed in.

Each router counts by itself and exchanges sums with the others a few times a second, so no request waits for a store;
N routers together may let through what arrives between two exchanges. Windows begin with the clock's minutes and days,
the same for all routers.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from baton_serve.services.router.protocol.caller import Caller

MINUTE_S = 60
DAY_S = 86_400
WINDOW_SPANS_S = (MINUTE_S, DAY_S)


@dataclass(frozen=True, slots=True)
class UsageWindow:
    caller: str
    span_s: int
    number: int
    """Since 1970."""


@dataclass(slots=True)
class _Count:
    requests: int = 0
    tokens: int = 0
    others_requests: int = 0
    others_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WindowUsage:
    window: UsageWindow
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class OverLimit:
    message: str
    retry_after_s: float


class UsageLedger:
    def __init__(self) -> None:
        self._counts: dict[UsageWindow, _Count] = {}

    def admit(self, caller: Caller, *, tokens: int, now: float) -> OverLimit | None:
        """Counts a request whose prompts have `tokens`, unless it is over a limit."""
        if not caller.is_limited:
            return None
        minute, day = (self._count(caller, span, now) for span in WINDOW_SPANS_S)
        for limit, used, added, span, what in (
            (caller.requests_per_minute, minute.requests + minute.others_requests, 1, MINUTE_S, "requests a minute"),
            (caller.tokens_per_minute, minute.tokens + minute.others_tokens, tokens, MINUTE_S, "tokens a minute"),
            (caller.tokens_per_day, day.tokens + day.others_tokens, tokens, DAY_S, "tokens a day"),
        ):
            # A request that alone is over a limit of tokens passes at the beginning of a window: else it never could.
            if limit and used + (added if used else 0) > limit:
                return OverLimit(f"the key {caller.name} may use {limit} {what}", span - now % span)
        minute.requests += 1
        day.requests += 1
        minute.tokens += tokens
        day.tokens += tokens
        return None

    def refund(self, caller: Caller, *, tokens: int, now: float) -> None:
        """Take back the tokens that `admit` counted, for a request that was then refused. It stays counted as a
        request: limits of requests are limits of attempts."""
        if caller.is_limited:
            for span in WINDOW_SPANS_S:
                count = self._count(caller, span, now)
                count.tokens = max(0, count.tokens - tokens)

    def add(self, caller: Caller, *, tokens: int, now: float) -> None:
        """Tokens that were generated."""
        if caller.is_limited:
            for span in WINDOW_SPANS_S:
                self._count(caller, span, now).tokens += tokens

    def own(self, now: float) -> list[WindowUsage]:
        """What this router counted, in windows that are not long over."""
        self._forget(now)
        return [WindowUsage(window, count.requests, count.tokens) for window, count in self._counts.items()]

    def merge_others(self, others: Iterable[WindowUsage]) -> None:
        """What all others counted; never less than before, for a store that was emptied knows too little."""
        for used in others:
            if (count := self._counts.get(used.window)) is not None:
                count.others_requests = max(count.others_requests, used.requests)
                count.others_tokens = max(count.others_tokens, used.tokens)

    def used(self, caller: Caller, now: float) -> Iterator[WindowUsage]:
        for span in WINDOW_SPANS_S:
            window = UsageWindow(caller.name, span, int(now // span))
            count = self._counts.get(window, _Count())
            yield WindowUsage(window, count.requests + count.others_requests, count.tokens + count.others_tokens)

    def _count(self, caller: Caller, span_s: int, now: float) -> _Count:
        return self._counts.setdefault(UsageWindow(caller.name, span_s, int(now // span_s)), _Count())

    def _forget(self, now: float) -> None:
        for window in [w for w in self._counts if (w.number + 2) * w.span_s < now]:
            del self._counts[window]

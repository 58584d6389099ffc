"""Decide whether an API key is over its rate limit or quota (requests, tokens per minute and day), and count its usage.

Each router counts by itself and exchanges sums with the others twice a second (`usage_exchange`), so that no request
waits for a store. The price: N routers together may exceed a limit by what arrives between two exchanges. All routers
use the same windows, the minutes and days of the wall clock. This module is pure: the time is passed in as `now`, in
seconds since 1970.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from baton_serve.services.router.protocol.caller import Caller

MINUTE_S = 60
DAY_S = 86_400
WINDOW_SPANS_S = (MINUTE_S, DAY_S)
"""Lengths of the windows in seconds. Every request is counted in one window of each length."""


@dataclass(frozen=True, slots=True)
class UsageWindow:
    """One minute or one day of one caller. It is the key under which several routers add up what the caller has
    used.
    """

    caller: str
    span_s: int
    number: int
    """Number of windows of this length from 1970 to this one."""


@dataclass(slots=True)
class _Count:
    """The numbers of requests and tokens of one caller in one window: those counted by this router, and those of all
    other routers from the last exchange.
    """

    requests: int = 0
    tokens: int = 0
    others_requests: int = 0
    others_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WindowUsage:
    """The number of requests and tokens that one caller has used in one window. Routers exchange it."""

    window: UsageWindow
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class OverLimit:
    """Says which limit of its API key a request exceeds, as a message for the client, and after how many seconds the
    window ends.
    """

    message: str
    retry_after_s: float


class UsageLedger:
    """Counts what all callers with limits have used, for one router process. Runs on the event loop."""

    def __init__(self) -> None:
        self._counts: dict[UsageWindow, _Count] = {}

    def admit(self, caller: Caller, *, tokens: int, now: float) -> OverLimit | None:
        """Count a request whose prompts have `tokens` tokens together, and return None. `now` is in seconds since 1970.

        If the request exceeds a limit of its caller, count nothing and return that limit.
        """
        # Callers without limits are not counted at all: they need neither memory here nor an exchange.
        if not caller.is_limited:
            return None
        minute, day = (self._count(caller, span, now) for span in WINDOW_SPANS_S)
        for limit, used, added, span, unit in (
            (caller.requests_per_minute, minute.requests + minute.others_requests, 1, MINUTE_S, "requests per minute"),
            (caller.tokens_per_minute, minute.tokens + minute.others_tokens, tokens, MINUTE_S, "tokens per minute"),
            (caller.tokens_per_day, day.tokens + day.others_tokens, tokens, DAY_S, "tokens per day"),
        ):
            # A request that alone exceeds a limit of tokens could never run. It is accepted as the first of a window.
            if limit and used + (added if used else 0) > limit:
                return OverLimit(f"the API key {caller.name} may use {limit} {unit}: retry later", span - now % span)
        minute.requests += 1
        day.requests += 1
        minute.tokens += tokens
        day.tokens += tokens
        return None

    def refund(self, caller: Caller, *, tokens: int, now: float) -> None:
        """Subtract the prompt tokens that `admit` counted, for a request that was rejected afterwards.

        The request itself stays counted, because limits on requests are limits on attempts.
        """
        if caller.is_limited:
            for span in WINDOW_SPANS_S:
                count = self._count(caller, span, now)
                # A new window may have started since `admit`: then there is nothing to take back.
                count.tokens = max(0, count.tokens - tokens)

    def add(self, caller: Caller, *, tokens: int, now: float) -> None:
        """Count the generated tokens of a request that has ended. They may exceed the caller's limit, and count against
        its next requests.
        """
        if caller.is_limited:
            for span in WINDOW_SPANS_S:
                self._count(caller, span, now).tokens += tokens

    def own(self, now: float) -> list[WindowUsage]:
        """Return what this router has counted in the present windows and the ones just before. `now` is in seconds
        since 1970.
        """
        self._forget(now)
        return [WindowUsage(window, count.requests, count.tokens) for window, count in self._counts.items()]

    def merge_others(self, others: Iterable[WindowUsage]) -> None:
        """Store what all other routers have counted together, as the last exchange returned it."""
        # Never less than before: a store that has lost its data knows too little until all routers have written again.
        for used in others:
            if (count := self._counts.get(used.window)) is not None:
                count.others_requests = max(count.others_requests, used.requests)
                count.others_tokens = max(count.others_tokens, used.tokens)

    def used(self, caller: Caller, now: float) -> Iterator[WindowUsage]:
        """Iterate over what the caller has used in the present minute and in the present day, counted by all routers
        together.
        """
        for span in WINDOW_SPANS_S:
            window = UsageWindow(caller.name, span, int(now // span))
            count = self._counts.get(window, _Count())
            yield WindowUsage(window, count.requests + count.others_requests, count.tokens + count.others_tokens)

    def _count(self, caller: Caller, span_s: int, now: float) -> _Count:
        return self._counts.setdefault(UsageWindow(caller.name, span_s, int(now // span_s)), _Count())

    def _forget(self, now: float) -> None:
        # One window longer than needed: clocks of routers differ, and another router may still count in the last one.
        for window in [w for w in self._counts if (w.number + 2) * w.span_s < now]:
            del self._counts[window]

"""Define who sends a request: the owner of the API key, its limits, its cache salt, and the SLO."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Describes the owner of an API key and the owner's limits; 0 means no limit.

    When requests are queued, a caller with `weight` 2 gets twice the share of one with weight 1.
    """

    name: str = "anonymous"
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    tokens_per_day: int = 0
    weight: float = 1.0
    min_priority: int | None = None
    """Smallest value of `priority` that its requests may have (smaller runs first); None allows any value."""
    cache_salt: str = ""
    """Salt of the caller's cache group, of a fixed length; empty if all callers share cached prefixes."""

    is_operator: bool = True
    """Whether it may change what all callers share: models, adapters and caches. Of keys with several owners only those
    may whose lines say so."""

    @property
    def is_limited(self) -> bool:
        """True if the requests and tokens of this caller must be counted, because there is a limit for them."""
        return bool(self.requests_per_minute or self.tokens_per_minute or self.tokens_per_day)

    def salt_of(self, requested: str | None) -> str:
        """Return the salt for the block hashes of a request of this caller. `requested` is the request's own
        `cache_salt`, or None.

        Requests share cached blocks only if their salts are equal: if their callers share a cache group and their own
        salts are equal.
        """
        if not self.cache_salt:
            return requested or ""
        # The first part has a fixed length, so no choice of `requested` makes this the salt of another group.
        return f"{self.cache_salt}:{requested or ''}"


ANONYMOUS = Caller()


@dataclass(frozen=True, slots=True)
class Slo:
    """The service level objective (SLO) of one request in seconds: time to first token and inter-token latency. None
    means no SLO.
    """

    ttft_s: float | None = None
    itl_s: float | None = None


NO_SLO = Slo()

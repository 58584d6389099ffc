"""Decides whether a failing instance may be tried (circuit breaker), and whether one more retry is permitted (retry
budget). Pure.

After `FAILURE_THRESHOLD` failures in a row a circuit breaker opens, and placement avoids its instance. After a pause,
which doubles each time, one request may try the instance again (half open); its success closes the circuit.
"""

from dataclasses import dataclass
from typing import Literal

from baton_serve.contracts.identity import RequestId

MIN_RETRIES_PER_S = 5.0
"""Retries per second that a router may always make, so that a few requests on a quiet router can be retried too."""
_MAX_RETRIES = 100.0
"""Retries that can be saved up, also the initial budget."""


@dataclass(slots=True)
class RetryBudget:
    """Bounds the retries of all requests of a router together, so that retries cannot multiply an overload.

    It is a token bucket: each request adds `ratio`, each second adds `MIN_RETRIES_PER_S`, each retry takes 1.
    """

    ratio: float
    _tokens: float = _MAX_RETRIES
    _at: float = 0.0

    def record_request(self) -> None:
        """Add the share that one new request contributes to the budget."""
        self._tokens = min(_MAX_RETRIES, self._tokens + self.ratio)

    def take_retry(self, now: float) -> bool:
        """Take one retry from the budget. Return False if the budget is used up, and always if `ratio` is 0."""
        if self.ratio <= 0:
            return False
        self._tokens = min(_MAX_RETRIES, self._tokens + max(0.0, now - self._at) * MIN_RETRIES_PER_S)
        self._at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


FAILURE_THRESHOLD = 5
"""Failures in a row that open the circuit."""
MIN_OPEN_S = 1.0
MAX_OPEN_S = 60.0
"""Bounds of the pause before the next try, in seconds."""

CircuitState = Literal["closed", "open", "half_open"]


@dataclass(slots=True)
class CircuitBreaker:
    """Keeps new requests away from one instance while it fails. `WorkerState` owns it. Times are in seconds on the
    router's monotonic clock.
    """

    failures: int = 0
    """Failures since the last success."""
    _pause_s: float = 0.0
    _open_until: float = 0.0
    _probe: RequestId | None = None
    """The request that tries the instance in a half-open circuit; None if none does."""

    def state(self, now: float) -> CircuitState:
        """Return whether new requests may be sent to the instance ("closed"), may not ("open"), or one may try whether
        it works again ("half_open").
        """
        if self.failures < FAILURE_THRESHOLD:
            return "closed"
        return "open" if now < self._open_until else "half_open"

    def allows(self, now: float) -> bool:
        """Return whether a new request may be sent to the instance now. If the circuit is half open, one request at a
        time may.
        """
        # The first test repeats one of `state`: placement asks for every instance, and nearly all are healthy.
        if self.failures < FAILURE_THRESHOLD:
            return True
        state = self.state(now)
        return state == "closed" or (state == "half_open" and self._probe is None)

    def begin_attempt(self, request_id: RequestId, now: float) -> None:
        """Record that this request is sent to the instance. If the circuit is half open, it is the trial that decides
        whether the circuit closes.
        """
        self._probe = request_id if self.state(now) == "half_open" else None

    def succeeded(self) -> None:
        """Close the circuit: the instance has answered a request."""
        self.failures, self._pause_s, self._probe = 0, 0.0, None

    def failed(self, now: float) -> None:
        """Count a failure of the instance, and open the circuit for a while if too many failures have come one after
        another.
        """
        self.failures += 1
        self._probe = None
        if self.failures >= FAILURE_THRESHOLD:
            self._pause_s = min(MAX_OPEN_S, max(MIN_OPEN_S, 2.0 * self._pause_s))
            self._open_until = now + self._pause_s

    def abandon_attempt(self, request_id: RequestId) -> None:
        """Record that a request ended without success or failure, for example by `Cancel`. If it was the trial of a
        half-open circuit, another request may be the next trial.
        """
        # Requests that were sent before the circuit opened also end here, while another one still tries.
        if self._probe == request_id:
            self._probe = None

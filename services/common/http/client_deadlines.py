"""Decides how long a client may take for its next action on a connection: keep-alive, headers, body, reading."""

import asyncio
from collections.abc import Callable

from baton_serve.services.common.http.connection_slots import HttpLimits, Slot
from baton_serve.services.common.http.late_timer import LateTimer

OnExpiry = Callable[[], object]


class ClientDeadlines:
    """Limits how long the client of one HTTP connection may take for its next action (to send a head, a piece of a body
    or a request, or to read). It also records in the connection's `Slot` what the connection is doing. There is one
    deadline at a time; each method replaces it. When it passes, `on_expiry` is called.
    """

    def __init__(self, limits: HttpLimits, slot: Slot, loop: asyncio.AbstractEventLoop) -> None:
        self._limits = limits
        self._slot = slot
        self._loop = loop
        self._timer = LateTimer(loop)
        self.is_lingering = False
        """True while input is discarded after a response that was sent before its request was complete."""
        self._lingers_until = 0.0
        self._discarded_bytes = 0

    @property
    def is_set(self) -> bool:
        return self._timer.is_set

    def await_server(self) -> None:
        """Remove the deadline, because now the client waits for this server: a request is being answered, or the client
        may not send the body yet.
        """
        self._slot.works()
        self._timer.clear()

    def await_first_head(self, on_expiry: OnExpiry) -> None:
        """Limit the time until the first request's head (request line and headers) of a new connection is complete.
        `on_expiry` is called if it takes longer than `head_timeout_s`.
        """
        self._slot.opens()
        self._timer.set(self._loop.time() + self._limits.head_timeout_s, on_expiry)

    def await_rest_of_head(self, since: float, on_expiry: OnExpiry) -> None:
        """Limit the time until a request's head is complete whose first byte came at `since` (time of the event loop).
        `on_expiry` is called if it takes longer than `head_timeout_s`.
        """
        self._slot.opens()
        self._timer.set(since + self._limits.head_timeout_s, on_expiry)

    def await_body(self, on_expiry: OnExpiry) -> None:
        """Limit the time until the next piece of a request's body arrives. `on_expiry` is called after
        `body_timeout_s`.
        """
        self._slot.works()
        self._timer.set(self._loop.time() + self._limits.body_timeout_s, on_expiry)

    def await_request(self, on_expiry: OnExpiry) -> None:
        """Limit how long a connection may stay open without a request. `on_expiry` is called after `keep_alive_s`."""
        self._slot.idles()
        self._timer.set(self._loop.time() + self._limits.keep_alive_s, on_expiry)

    def await_close(self, on_expiry: OnExpiry) -> None:
        """Limit the time in which the client must receive the remaining data of a connection that is being closed.
        `on_expiry` is called after `send_timeout_s`.
        """
        self._slot.idles()
        self._timer.set(self._loop.time() + self._limits.send_timeout_s, on_expiry)

    def begin_lingering(self) -> None:
        """Start to discard further data of the client, with limits for its size and time, because a request was
        answered before all of it had arrived.
        """
        self.is_lingering = True
        self._lingers_until = self._loop.time() + self._limits.lingering_time_s
        self._discarded_bytes = 0

    def end_lingering(self) -> None:
        """Stop discarding data of the client, because the whole request that was answered early has arrived."""
        self.is_lingering = False

    def discard(self, num_bytes: int) -> bool:
        """Count `num_bytes` of discarded data since `begin_lingering`. Return False if their sum exceeds
        `lingering_bytes`.
        """
        self._discarded_bytes += num_bytes
        return self._discarded_bytes <= self._limits.lingering_bytes

    def await_discarded(self, on_expiry: OnExpiry) -> None:
        """Limit the time for the next piece of data to discard, and for all of it since `begin_lingering`. `on_expiry`
        is called when either limit passes.
        """
        self._slot.idles()
        self._timer.set(min(self._loop.time() + self._limits.lingering_timeout_s, self._lingers_until), on_expiry)

    def close(self) -> None:
        """Remove the deadline and free the connection's slot, at the end of the connection."""
        self._slot.release()
        self._timer.close()

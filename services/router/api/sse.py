"""Write the deltas of a generation to the client as server-sent events.

While the client keeps up, an event is written in the call that brings its tokens. Otherwise the request's task writes
it and waits for the client. Waking a task for each token would be a large part of the router's CPU time (ADR 0011).
"""

from collections.abc import Callable

from baton_serve.services.router.api.generation import TextGeneration
from baton_serve.services.router.protocol.asgi import EventStream
from baton_serve.services.router.text.text_output import TextDelta


class SseDeltaWriter:
    """Copies one generation to one event stream. Implements `generation.DeltaConsumer`."""

    __slots__ = ("_encode", "_events", "_exchange")

    def __init__(self, events: EventStream, encode: Callable[[int, TextDelta], bytes]) -> None:
        """Create it. `encode` returns the events for the next delta of a choice: one or more, or empty bytes."""
        self._events = events
        self._exchange = events.exchange
        self._encode = encode

    async def copy(self, generation: TextGeneration) -> bytes:
        """Copy events until the generation is done, and return the last ones without writing them.

        The caller sends them together with the end of the stream. Raises `ApiError` or `ClientGoneError`.
        """
        while True:
            # Without an exchange (another server, or a middleware of the operator) every write must be awaited.
            text_deltas = await generation.take(None if self._exchange is None else self)
            data = b"".join([self._encode(choice, text_delta) for choice, text_delta in text_deltas])
            if generation.is_done:
                return data
            if data:
                await self._events.write(data)

    def can_write(self) -> bool:
        """Return whether the client has taken what was written so far."""
        assert self._exchange is not None, "copy passes no consumer without an exchange"
        return self._exchange.is_writable

    def write_delta(self, choice: int, text_delta: TextDelta) -> None:
        """Write the events of a delta at once. Call it only if `can_write` returned True."""
        assert self._exchange is not None, "copy passes no consumer without an exchange"
        if data := self._encode(choice, text_delta):
            self._exchange.write(data)

"""A generation's pieces as events: written in the call that brought their tokens while the client keeps up, else by the
request's task, which waits for the client.
"""

from collections.abc import Callable

from baton_serve.services.router.api.generation import TextGeneration
from baton_serve.services.router.protocol.asgi import EventStream
from baton_serve.services.router.text.text_output import TextDelta


class SseDeltaWriter:
    """`services.router.api.generation.Follower`."""

    __slots__ = ("_encode", "_events", "_exchange")

    def __init__(self, events: EventStream, encode: Callable[[int, TextDelta], bytes]) -> None:
        """`encode`: the events of a choice's next piece, often one, sometimes none."""
        self._events = events
        self._exchange = events.exchange
        self._encode = encode

    async def copy(self, generation: TextGeneration) -> bytes:
        """Until the generation is done. Returns the last events, not yet written: the stream's end leaves with them.
        Raises `ApiError` or `ClientGoneError`."""
        while True:
            text_deltas = await generation.take(None if self._exchange is None else self)
            data = b"".join([self._encode(choice, text_delta) for choice, text_delta in text_deltas])
            if generation.is_done:
                return data
            if data:
                await self._events.write(data)

    def can_write(self) -> bool:
        assert self._exchange is not None, "it is a follower"
        return self._exchange.is_writable

    def write_delta(self, choice: int, text_delta: TextDelta) -> None:
        assert self._exchange is not None, "it keeps up"
        if data := self._encode(choice, text_delta):
            self._exchange.write(data)

"""The pieces of all choices of one API call, as they come. Ends flights whose text has ended."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from baton_serve.services.router.protocol.errors import ClientGoneError
from baton_serve.services.router.protocol.explanation import Explanation
from baton_serve.services.router.protocol.openai_responses import CachedTokens, Usage
from baton_serve.services.router.requests.lifecycle import Flight
from baton_serve.services.router.requests.metrics import RouterMetrics
from baton_serve.services.router.requests.token_queue import Outbox
from baton_serve.services.router.text.text_output import Piece, SequenceWriter
from baton_serve.services.router.text.token_sequence import New


class Follower(Protocol):
    """Gets pieces in the call that brings their tokens, as long as it can."""

    def keeps_up(self) -> bool: ...
    def follow(self, choice: int, piece: Piece) -> None: ...


class Answering(Protocol):
    """What an endpoint sends its client, wherever it comes from. `flights`: one a prompt, in order."""

    @property
    def flights(self) -> Sequence[Flight]: ...
    @property
    def num_choices(self) -> int: ...
    @property
    def is_done(self) -> bool: ...
    def flight(self, choice: int) -> Flight: ...
    async def take(self, follower: Follower | None = None) -> list[tuple[int, Piece]]: ...
    def abandon(self) -> None: ...
    def cancel(self, reason: str) -> None: ...
    def usage(self) -> Usage: ...
    def explain(self) -> Explanation | list[Explanation]: ...


@contextmanager
def ended(generation: Answering) -> Iterator[None]:
    """Whatever happens in the `with` block, no instance works for the generation after it."""
    try:
        yield
    finally:
        generation.cancel("its answer has ended")


class Generation:
    """Choice `i` is sequence `i % n` of flight `i // n`."""

    __slots__ = ("_clock", "_last_at", "_metrics", "_n", "_num_running", "_outbox", "flights", "num_choices", "writers")

    def __init__(
        self,
        flights: Sequence[Flight],
        outbox: Outbox,
        writers: Sequence[SequenceWriter],
        *,
        metrics: RouterMetrics,
        clock: Callable[[], float],
    ) -> None:
        self.flights = flights
        self.writers = writers
        self.num_choices = len(writers)
        self._outbox = outbox
        self._n = len(writers) // len(flights)
        self._metrics = metrics
        self._clock = clock
        self._last_at: list[float | None] = [None] * len(writers)
        self._num_running = len(writers)

    @property
    def is_done(self) -> bool:
        return self._num_running == 0

    def flight(self, choice: int) -> Flight:
        return self.flights[choice // self._n]

    async def take(self, follower: Follower | None = None) -> list[tuple[int, Piece]]:
        """The next pieces, in order for each choice; `follower` gets those that it can, before them: never one with
        which a choice ends. Raises `ApiError` or `ClientGoneError`."""
        pieces: list[tuple[int, Piece]] = []
        at_once = None
        if follower is not None and not any([writer.may_end_early for writer in self.writers]):
            at_once = partial(self._pass_on, follower)
        while not pieces:
            for output in await self._outbox.take(at_once):
                writer = self.writers[output.choice]
                if writer.is_finished:
                    continue
                piece = writer.push(output.tokens)
                pieces.append((output.choice, piece))
                if piece.token_ids:
                    self._observe(output.choice, len(piece.token_ids), output.at)
                if writer.is_finished:
                    self._num_running -= 1
                    self.flight(output.choice).stop(output.choice % self._n)
        return pieces

    def _pass_on(self, follower: Follower, choice: int, tokens: New, at: float) -> bool:
        if tokens.finish_reason is not None or not follower.keeps_up():
            return False
        piece = self.writers[choice].push(tokens)
        self._observe(choice, len(piece.token_ids), at)
        follower.follow(choice, piece)
        return True

    def abandon(self) -> None:
        """The client has gone."""
        self._outbox.fail(ClientGoneError("the client disconnected"))
        self.cancel("the client disconnected")

    def cancel(self, reason: str) -> None:
        for flight in self.flights:
            flight.cancel(reason)

    def usage(self) -> Usage:
        return usage_of(self.flights, sum([writer.num_tokens for writer in self.writers]))

    def explain(self) -> Explanation | list[Explanation]:
        return explained(self.flights, self._clock())

    def _observe(self, choice: int, num_tokens: int, at: float) -> None:
        last = self._last_at[choice]
        self._last_at[choice] = at
        self._metrics.generated(num_tokens, None if last is None else (at - last) / num_tokens)


def usage_of(flights: Sequence[Flight], generated: int) -> Usage:
    prompt = sum([len(flight.job.token_ids) for flight in flights])
    cached = sum([sum(flight.timeline.cached_tokens.values()) for flight in flights])
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=generated,
        total_tokens=prompt + generated,
        prompt_tokens_details=CachedTokens(cached),
    )


def explained(flights: Sequence[Flight], now: float) -> Explanation | list[Explanation]:
    """A list only when there are several prompts."""
    found = [flight.timeline.explain(flight.job.request_id, now) for flight in flights]
    return found[0] if len(found) == 1 else found

"""`best_of`: more sequences are written than are wanted, and those that the model finds most likely are the answer.

As vLLM ranks them: by the sum of the log-probabilities of their tokens. Nothing can be sent before all have ended.
"""

from collections.abc import Sequence

from baton_serve.services.router.api.generation import Follower, Generation
from baton_serve.services.router.protocol.explanation import Explanation
from baton_serve.services.router.protocol.openai_responses import Usage
from baton_serve.services.router.requests.lifecycle import Flight
from baton_serve.services.router.text.text_output import Gathered, Piece


class BestOf:
    """`api.generation.Answering`. The sequences of `inner` bring logprobs, whether the client wants them
    or not."""

    def __init__(self, inner: Generation, *, count: int, keeps_logprobs: bool) -> None:
        self.flights: Sequence[Flight] = inner.flights
        self.num_choices = count * len(inner.flights)
        self.is_done = False
        self._inner = inner
        self._count = count
        self._keeps_logprobs = keeps_logprobs

    def flight(self, choice: int) -> Flight:
        return self.flights[choice // self._count]

    async def take(self, follower: Follower | None = None) -> list[tuple[int, Piece]]:
        """All choices, complete: nothing to follow. Raises `ApiError` or `ClientGoneError`."""
        gathered = [Gathered() for _ in range(self._inner.num_choices)]
        while not self._inner.is_done:
            for number, piece in await self._inner.take():
                gathered[number].add(piece)
        self.is_done = True
        pieces = [one.whole() for one in gathered]
        width = len(pieces) // len(self.flights)
        best = [piece for i in range(0, len(pieces), width) for piece in best_of(pieces[i : i + width], self._count)]
        if not self._keeps_logprobs:
            for piece in best:
                piece.logprobs = None
        return list(enumerate(best))

    def abandon(self) -> None:
        self._inner.abandon()

    def cancel(self, reason: str) -> None:
        self._inner.cancel(reason)

    def usage(self) -> Usage:
        return self._inner.usage()

    def explain(self) -> Explanation | list[Explanation]:
        return self._inner.explain()


def best_of(pieces: Sequence[Piece], count: int) -> list[Piece]:
    """The most likely first; among equals the first written."""
    return sorted(pieces, key=_cumulative, reverse=True)[:count]


def _cumulative(piece: Piece) -> float:
    return sum(step.chosen.logprob for step in piece.logprobs or ())

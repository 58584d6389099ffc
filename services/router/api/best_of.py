"""`best_of`: more sequences are written than are wanted, and those that the model finds most likely are the answer.

As vLLM ranks them: by the sum of the log-probabilities of their tokens. Nothing can be sent before all have ended.
"""

from collections.abc import Sequence

from baton_serve.services.router.api.generation import DeltaConsumer, SampledGeneration
from baton_serve.services.router.protocol.openai_responses import Explanation, Usage
from baton_serve.services.router.requests.lifecycle import RequestLifecycle
from baton_serve.services.router.text.text_output import TextAccumulator, TextDelta


class BestOfGeneration:
    """`api.generation.Answering`. The sequences of `inner` bring logprobs, whether the client wants them
    or not."""

    def __init__(self, inner: SampledGeneration, *, count: int, keeps_logprobs: bool) -> None:
        self.lifecycles: Sequence[RequestLifecycle] = inner.lifecycles
        self.num_choices = count * len(inner.lifecycles)
        self.is_done = False
        self._inner = inner
        self._count = count
        self._keeps_logprobs = keeps_logprobs

    def lifecycle(self, choice: int) -> RequestLifecycle:
        return self.lifecycles[choice // self._count]

    async def take(self, consumer: DeltaConsumer | None = None) -> list[tuple[int, TextDelta]]:
        """All choices, complete: nothing to follow. Raises `ApiError` or `ClientGoneError`."""
        gathered = [TextAccumulator() for _ in range(self._inner.num_choices)]
        while not self._inner.is_done:
            for number, text_delta in await self._inner.take():
                gathered[number].add(text_delta)
        self.is_done = True
        text_deltas = [one.whole() for one in gathered]
        width = len(text_deltas) // len(self.lifecycles)
        best = [
            text_delta
            for i in range(0, len(text_deltas), width)
            for text_delta in best_of(text_deltas[i : i + width], self._count)
        ]
        if not self._keeps_logprobs:
            for text_delta in best:
                text_delta.logprobs = None
        return list(enumerate(best))

    def abandon(self) -> None:
        self._inner.abandon()

    def cancel(self, reason: str) -> None:
        self._inner.cancel(reason)

    def usage(self) -> Usage:
        return self._inner.usage()

    def explain(self) -> Explanation | list[Explanation]:
        return self._inner.explain()


def best_of(text_deltas: Sequence[TextDelta], count: int) -> list[TextDelta]:
    """The most likely first; among equals the first written."""
    return sorted(text_deltas, key=_cumulative, reverse=True)[:count]


def _cumulative(text_delta: TextDelta) -> float:
    return sum(step.chosen.logprob for step in text_delta.logprobs or ())

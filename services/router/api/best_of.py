"""Implement `best_of`: generate more sequences than the client wants, and answer with the most likely ones.

As in vLLM, sequences are ranked by the sum of their tokens' log-probabilities. Nothing can be sent before all sequences
have ended.
"""

from collections.abc import Sequence

from baton_serve.services.router.api.generation import DeltaConsumer, SampledGeneration
from baton_serve.services.router.protocol.openai_responses import Explanation, Usage
from baton_serve.services.router.requests.lifecycle import RequestLifecycle
from baton_serve.services.router.text.text_output import TextAccumulator, TextDelta


class BestOfGeneration:
    """A `TextGeneration` that returns the best `count` sequences of each prompt of another one."""

    def __init__(self, inner: SampledGeneration, *, count: int, keeps_logprobs: bool) -> None:
        """Create the generation. All sequences of `inner` must carry logprobs, which rank them.

        `keeps_logprobs` says whether the client wants them too.
        """
        self.lifecycles: Sequence[RequestLifecycle] = inner.lifecycles
        self.num_choices = count * len(inner.lifecycles)
        self.is_done = False
        self._inner = inner
        self._count = count
        self._keeps_logprobs = keeps_logprobs

    def lifecycle(self, choice: int) -> RequestLifecycle:
        return self.lifecycles[choice // self._count]

    async def take(self, consumer: DeltaConsumer | None = None) -> list[tuple[int, TextDelta]]:
        """Wait for the end of all sequences and return one complete delta for each choice; `consumer` is not used.

        Raises `ApiError` or `ClientGoneError`.
        """
        gathered = [TextAccumulator() for _ in range(self._inner.num_choices)]
        while not self._inner.is_done:
            for number, text_delta in await self._inner.take():
                gathered[number].add(text_delta)
        self.is_done = True
        text_deltas = [one.whole() for one in gathered]
        # Choices of one prompt stand together, and only these compete.
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
        """Return the token counts of all sequences. The ones that were not chosen were computed too, so they count."""
        return self._inner.usage()

    def explain(self) -> Explanation | list[Explanation]:
        return self._inner.explain()


def best_of(text_deltas: Sequence[TextDelta], count: int) -> list[TextDelta]:
    """Return the `count` most likely texts, the best first. Equal ones stay in their order (the sort is stable)."""
    return sorted(text_deltas, key=_cumulative, reverse=True)[:count]


def _cumulative(text_delta: TextDelta) -> float:
    return sum(step.chosen.logprob for step in text_delta.logprobs or ())

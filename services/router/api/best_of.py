"""Implement `best_of`: generate more sequences than the client wants, and choose the most likely ones.

As in vLLM, sequences are ranked by the sum of their tokens' log-probabilities. Nothing can be sent before all sequences
have ended.
"""

from collections.abc import Sequence
from operator import attrgetter

from baton_serve.services.router.api.generation import DeltaConsumer, SampledGeneration
from baton_serve.services.router.protocol.openai_responses import Explanation, Usage
from baton_serve.services.router.requests.lifecycle import RequestLifecycle
from baton_serve.services.router.text.sampling_params import check_num_logprobs
from baton_serve.services.router.text.text_output import TextAccumulator, TextDelta


class BestOfGeneration:
    """Implements `best_of`: a `TextGeneration` that computes more sequences of each prompt than the client gets, and
    returns the `count` most likely ones.
    """

    def __init__(self, inner: SampledGeneration, *, count: int, keeps_logprobs: bool) -> None:
        """Take over `inner`, which generates all sequences. Each of its tokens must carry a logprob, because the sums
        of the logprobs rank the sequences; `count` of them are returned for each prompt.

        `keeps_logprobs` says whether the client wants logprobs too; otherwise they are removed.
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
        """Wait until all sequences have ended, and return one complete delta for each choice, with the index of the
        choice. `consumer` is not used.

        Raises the `ApiError` that ended a request, or `ClientGoneError` after `abandon`.
        """
        gathered = [RankedText() for _ in range(self._inner.num_choices)]
        num_logprobs = 0
        while not self._inner.is_done:
            for number, text_delta in await self._inner.take():
                gathered[number].add(text_delta, keeps_logprobs=self._keeps_logprobs)
                num_logprobs += text_delta.num_logprobs
            check_num_logprobs(
                num_logprobs, remedy="ask for fewer sequences (best_of), tokens or alternatives; all sequences count"
            )
        self.is_done = True
        # Choices of one prompt stand together, and only these compete.
        width = len(gathered) // len(self.lifecycles)
        best = [one for i in range(0, len(gathered), width) for one in best_of(gathered[i : i + width], self._count)]
        return [(choice, one.whole()) for choice, one in enumerate(best)]

    def abandon(self) -> None:
        self._inner.abandon()

    def cancel(self, reason: str) -> None:
        self._inner.cancel(reason)

    def usage(self) -> Usage:
        """Return the token counts of all sequences. The sequences that were not chosen were computed too, so they
        count.
        """
        return self._inner.usage()

    def explain(self) -> Explanation | list[Explanation]:
        return self._inner.explain()


class RankedText(TextAccumulator):
    """Collects the text of one sequence, and adds up the log-probabilities of its tokens (`cumulative`)."""

    def __init__(self) -> None:
        super().__init__()
        self.cumulative = 0.0

    def add(self, text_delta: TextDelta, *, keeps_logprobs: bool = True) -> None:
        """Append the next delta of the sequence. Its logprobs are added to the sum; without `keeps_logprobs` they are
        then removed from the delta.
        """
        for step in text_delta.logprobs or ():
            self.cumulative += step.chosen.logprob
        if not keeps_logprobs:
            text_delta.logprobs = None
        super().add(text_delta)


def best_of(texts: Sequence[RankedText], count: int) -> list[RankedText]:
    """Return the `count` most likely texts, the best first. Equally likely ones keep their order."""
    return sorted(texts, key=attrgetter("cumulative"), reverse=True)[:count]

"""Turn the tokens of one API call into text deltas, count its `usage`, and cancel it when its client is gone.

`answer_writer` and `content_block_writer` take the deltas from a `TextGeneration` and send them to the client.
Sequences whose text has ended, for example at a stop string, are stopped on their instances from here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from baton_serve.services.router.protocol.errors import ClientGoneError
from baton_serve.services.router.protocol.openai_responses import CachedTokens, Explanation, Usage
from baton_serve.services.router.requests.lifecycle import RequestLifecycle
from baton_serve.services.router.requests.metrics import RouterMetrics
from baton_serve.services.router.requests.token_queue import TokenQueue
from baton_serve.services.router.text.text_output import SequenceWriter, TextDelta
from baton_serve.services.router.text.token_sequence import TokenUpdate


class DeltaConsumer(Protocol):
    """Receives text deltas in the same call in which their tokens arrive in the router, without a switch to the
    request's asyncio task. `answer.SseDeltaWriter` implements it. Its methods must not block.
    """

    def can_write(self) -> bool:
        """Return whether the client has read all earlier events, so that the next delta may be written immediately."""
        ...

    def write_delta(self, choice: int, text_delta: TextDelta) -> None:
        """Write the next delta of a choice to the client. It is never the last delta of the choice, which `take`
        returns.
        """
        ...


class TextGeneration(Protocol):
    """Generates the text of one API call and returns it as deltas: sampled text, the best of several texts, or a beam
    search.

    It is created by `ModelService.generate`. The endpoint owns it and ends it with `ended`.
    """

    @property
    def lifecycles(self) -> Sequence[RequestLifecycle]:
        """The requests to the instances: one for each prompt of the API call, in order."""
        ...

    @property
    def num_choices(self) -> int:
        """The number of choices of the answer, of all prompts together."""
        ...

    @property
    def is_done(self) -> bool:
        """True once all choices have ended and `take` has returned all deltas."""
        ...

    def lifecycle(self, choice: int) -> RequestLifecycle:
        """Return the request to the instances that computes a choice."""
        ...

    async def take(self, consumer: DeltaConsumer | None = None) -> list[tuple[int, TextDelta]]:
        """Wait for the next text deltas and return them, each with the index of its choice. `consumer`, if given, may
        get deltas directly instead; see `SampledGeneration.take`.
        """
        ...

    def abandon(self) -> None:
        """Cancel the generation because the client has disconnected; `take` raises `ClientGoneError` then."""
        ...

    def cancel(self, reason: str) -> None:
        """Stop all work of the instances for this API call. `reason` is for logs."""
        ...

    def usage(self) -> Usage:
        """Return the numbers of prompt, cached and generated tokens so far."""
        ...

    def explain(self) -> Explanation | list[Explanation]:
        """Return on which instances each request was placed and how long each phase took (header `x-baton-explain`); a
        list if there are several prompts.
        """
        ...


@contextmanager
def ended(generation: TextGeneration) -> Iterator[None]:
    """Return a context manager that cancels `generation` at the end of the `with` block, also after an error, so that
    no instance continues to work for it.
    """
    try:
        yield
    finally:
        generation.cancel("its answer has ended")


class SampledGeneration:
    """The `TextGeneration` of ordinary requests: n sampled sequences for each prompt.

    Choice `i` is sequence `i % n` of the request for prompt `i // n`, in OpenAI's order. `writers` has one entry for
    each choice, which converts its tokens to text.
    """

    __slots__ = (
        "_clock",
        "_last_at",
        "_metrics",
        "_n",
        "_num_running",
        "_token_queue",
        "lifecycles",
        "num_choices",
        "writers",
    )

    def __init__(
        self,
        lifecycles: Sequence[RequestLifecycle],
        token_queue: TokenQueue,
        writers: Sequence[SequenceWriter],
        *,
        metrics: RouterMetrics,
        clock: Callable[[], float],
    ) -> None:
        self.lifecycles = lifecycles
        self.writers = writers
        self.num_choices = len(writers)
        self._token_queue = token_queue
        token_queue.on_overflow = partial(self.cancel, "the client reads too slowly")
        self._n = len(writers) // len(lifecycles)
        self._metrics = metrics
        self._clock = clock
        self._last_at: list[float | None] = [None] * len(writers)
        self._num_running = len(writers)

    @property
    def is_done(self) -> bool:
        return self._num_running == 0

    def lifecycle(self, choice: int) -> RequestLifecycle:
        return self.lifecycles[choice // self._n]

    async def take(self, consumer: DeltaConsumer | None = None) -> list[tuple[int, TextDelta]]:
        """Wait until there are new deltas and return them, each with the index of its choice. The deltas of a choice
        are in order.

        While this waits, `consumer` gets deltas directly as long as its client reads fast enough; these are not
        returned here. The delta that ends a choice is always returned. Raises the `ApiError` that ended a request, or
        `ClientGoneError`.
        """
        text_deltas: list[tuple[int, TextDelta]] = []
        callback = None
        # A writer with stop strings may end a choice at any token. Then the sequence must be stopped on its instance,
        # which is left to the request's task: the consumer runs in the middle of a message with many requests' tokens.
        if consumer is not None and not any([writer.may_end_early for writer in self.writers]):
            callback = partial(self._pass_on, consumer)
        while not text_deltas:
            for output in await self._token_queue.take(callback):
                writer = self.writers[output.choice]
                # The instance had computed these tokens before it received the request to stop this sequence.
                if writer.is_finished:
                    continue
                text_delta = writer.push(output.tokens)
                text_deltas.append((output.choice, text_delta))
                if text_delta.token_ids:
                    self._observe(output.choice, len(text_delta.token_ids), output.at)
                if writer.is_finished:
                    self._num_running -= 1
                    self.lifecycle(output.choice).stop_sequence(output.choice % self._n)
        return text_deltas

    def _pass_on(self, consumer: DeltaConsumer, choice: int, tokens: TokenUpdate, at: float) -> bool:
        """Convert new tokens of a choice to a delta and write it with `consumer`. `at` is the time at which they
        arrived, in seconds. Return False, with nothing done, if `take` must return the tokens instead.
        """
        if tokens.finish_reason is not None or not consumer.can_write():
            return False
        text_delta = self.writers[choice].push(tokens)
        self._observe(choice, len(text_delta.token_ids), at)
        consumer.write_delta(choice, text_delta)
        return True

    def abandon(self) -> None:
        """Cancel the generation because the client has disconnected, and make `take` raise `ClientGoneError`."""
        self._token_queue.fail(ClientGoneError("the client disconnected"))
        self.cancel("the client disconnected")

    def cancel(self, reason: str) -> None:
        # The queue must not refer to its owner for ever: such a cycle would be left to the garbage collector.
        self._token_queue.on_overflow = None
        for lifecycle in self.lifecycles:
            lifecycle.cancel(reason)

    def usage(self) -> Usage:
        return usage_of(self.lifecycles, sum([writer.num_tokens for writer in self.writers]))

    def explain(self) -> Explanation | list[Explanation]:
        return explained(self.lifecycles, self._clock())

    def _observe(self, choice: int, num_tokens: int, at: float) -> None:
        # Several tokens may arrive together (a replay, a late message): the gap is then shared among them.
        last = self._last_at[choice]
        self._last_at[choice] = at
        self._metrics.generated(num_tokens, None if last is None else (at - last) / num_tokens)


def usage_of(lifecycles: Sequence[RequestLifecycle], generated: int) -> Usage:
    """Return the token counts of an API call: the prompt and cached tokens of its requests, and `generated`, the number
    of generated tokens.
    """
    prompt = sum([len(lifecycle.request.token_ids) for lifecycle in lifecycles])
    cached = sum([sum(lifecycle.timeline.cached_tokens.values()) for lifecycle in lifecycles])
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=generated,
        total_tokens=prompt + generated,
        prompt_tokens_details=CachedTokens(cached),
    )


def explained(lifecycles: Sequence[RequestLifecycle], now: float) -> Explanation | list[Explanation]:
    """Return how the request was placed and timed until `now`; if there are several (one for each prompt), return a
    list.
    """
    explanations = [lifecycle.timeline.explain(lifecycle.request.request_id, now) for lifecycle in lifecycles]
    return explanations[0] if len(explanations) == 1 else explanations

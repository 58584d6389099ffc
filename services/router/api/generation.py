"""The pieces of all choices of one API call, as they come. Ends flights whose text has ended."""

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
    """Gets pieces in the call that brings their tokens, as long as it can."""

    def can_write(self) -> bool: ...
    def write_delta(self, choice: int, text_delta: TextDelta) -> None: ...


class TextGeneration(Protocol):
    """What an endpoint sends its client, wherever it comes from. `lifecycles`: one a prompt, in order."""

    @property
    def lifecycles(self) -> Sequence[RequestLifecycle]: ...
    @property
    def num_choices(self) -> int: ...
    @property
    def is_done(self) -> bool: ...
    def lifecycle(self, choice: int) -> RequestLifecycle: ...
    async def take(self, consumer: DeltaConsumer | None = None) -> list[tuple[int, TextDelta]]: ...
    def abandon(self) -> None: ...
    def cancel(self, reason: str) -> None: ...
    def usage(self) -> Usage: ...
    def explain(self) -> Explanation | list[Explanation]: ...


@contextmanager
def ended(generation: TextGeneration) -> Iterator[None]:
    """Whatever happens in the `with` block, no instance works for the generation after it."""
    try:
        yield
    finally:
        generation.cancel("its answer has ended")


class SampledGeneration:
    """Choice `i` is sequence `i % n` of flight `i // n`."""

    __slots__ = (
        "_clock",
        "_last_at",
        "_metrics",
        "_n",
        "_num_running",
        "_outbox",
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
        self._outbox = token_queue
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
        """The next pieces, in order for each choice; `consumer` gets those that it can, before them: never one with
        which a choice ends. Raises `ApiError` or `ClientGoneError`."""
        text_deltas: list[tuple[int, TextDelta]] = []
        callback = None
        if consumer is not None and not any([writer.may_end_early for writer in self.writers]):
            callback = partial(self._pass_on, consumer)
        while not text_deltas:
            for output in await self._outbox.take(callback):
                writer = self.writers[output.choice]
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
        if tokens.finish_reason is not None or not consumer.can_write():
            return False
        text_delta = self.writers[choice].push(tokens)
        self._observe(choice, len(text_delta.token_ids), at)
        consumer.write_delta(choice, text_delta)
        return True

    def abandon(self) -> None:
        """The client has gone."""
        self._outbox.fail(ClientGoneError("the client disconnected"))
        self.cancel("the client disconnected")

    def cancel(self, reason: str) -> None:
        for lifecycle in self.lifecycles:
            lifecycle.cancel(reason)

    def usage(self) -> Usage:
        return usage_of(self.lifecycles, sum([writer.num_tokens for writer in self.writers]))

    def explain(self) -> Explanation | list[Explanation]:
        return explained(self.lifecycles, self._clock())

    def _observe(self, choice: int, num_tokens: int, at: float) -> None:
        last = self._last_at[choice]
        self._last_at[choice] = at
        self._metrics.generated(num_tokens, None if last is None else (at - last) / num_tokens)


def usage_of(lifecycles: Sequence[RequestLifecycle], generated: int) -> Usage:
    prompt = sum([len(lifecycle.request.token_ids) for lifecycle in lifecycles])
    cached = sum([sum(lifecycle.timeline.cached_tokens.values()) for lifecycle in lifecycles])
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=generated,
        total_tokens=prompt + generated,
        prompt_tokens_details=CachedTokens(cached),
    )


def explained(lifecycles: Sequence[RequestLifecycle], now: float) -> Explanation | list[Explanation]:
    """A list only when there are several prompts."""
    found = [lifecycle.timeline.explain(lifecycle.request.request_id, now) for lifecycle in lifecycles]
    return found[0] if len(found) == 1 else found

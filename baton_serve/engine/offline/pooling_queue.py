"""Collects the inputs of coroutines that wait for a pooling model, so that those of one step are computed together.
Those of one step are computed together.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby

from baton_serve.contracts import pooling
from baton_serve.engine.errors import EngineError
from baton_serve.engine.offline.outputs import PoolingOutput, PoolingRequestOutput, VectorRequestOutput
from baton_serve.engine.offline.pooler import OfflinePooler
from baton_serve.engine.offline.progress import PromptProgressBar
from baton_serve.engine.offline.prompts import ParsedPrompt
from baton_serve.engine.offline.request_params import PoolingParams


@dataclass(frozen=True, slots=True)
class WaitingInput:
    """One input that a coroutine has passed to `AsyncLLMEngine.encode`. `notify` is called once, with the input's
    output or error."""

    request_id: str
    prompt: ParsedPrompt
    params: PoolingParams
    task: pooling.PoolingTask | None
    notify: Callable[[PoolingRequestOutput | EngineError], None]


class PoolingQueue:
    """Collects the inputs of several coroutines, to compute them together with a pooling model. Not thread-safe.
    `AsyncLLMEngine` owns it and calls `close` at the end."""

    def __init__(self, pooler: OfflinePooler) -> None:
        """`pooler` computes the inputs; `close` closes its engine."""
        self._pooler = pooler
        self._calls: list[WaitingInput] = []

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    def add(self, call: WaitingInput) -> None:
        """Queue an input, to be computed by the next call of `step`."""
        self._calls.append(call)

    def remove(self, request_id: str) -> None:
        """Drop the queued input with this id. An unknown id, or one whose input was computed already, is ignored."""
        self._calls = [call for call in self._calls if call.request_id != request_id]

    def step(self) -> None:
        """Compute all queued inputs, those with equal parameters together, and notify their callers."""
        calls, self._calls = sorted(self._calls, key=_kind), []
        for _, group in groupby(calls, key=_kind):
            self._compute(list(group))

    def close(self) -> None:
        """Free the model and its memory. The callers of queued inputs get an `EngineError`."""
        calls, self._calls = self._calls, []
        for call in calls:
            call.notify(EngineError("the engine was shut down"))
        self._pooler.engine.close()

    def _compute(self, calls: list[WaitingInput]) -> None:
        try:
            outputs = list(self._outputs(calls))
        except EngineError as exc:
            # One input that is too long must not fail the others of the same step.
            if len(calls) == 1:
                calls[0].notify(exc)
            else:
                for call in calls:
                    self._compute([call])
            return
        for call, output in zip(calls, outputs, strict=True):
            call.notify(output)

    def _outputs(self, calls: list[WaitingInput]) -> Iterable[PoolingRequestOutput]:
        pooler, first = self._pooler, calls[0]
        inputs = pooler.inputs([call.prompt for call in calls], first.params.truncate_prompt_tokens)
        task = first.task or pooler.engine.profile.tasks[0]
        with PromptProgressBar(len(inputs), shown=False) as progress:
            vectors = pooler.pool(inputs, task, first.params, progress)
        for call, given, vector in zip(calls, inputs, vectors, strict=True):
            yield VectorRequestOutput(
                request_id=call.request_id, outputs=PoolingOutput(vector), prompt_token_ids=given.token_ids
            )


def _kind(call: WaitingInput) -> str:
    """Return a key that is equal for inputs which can be computed together: they have equal tasks and parameters."""
    return f"{call.task} {call.params}"

"""Serves a `Generate` message: the engine of this instance computes the prompt and generates the answer, without a
handoff.

Used by all three roles; by prefill instances only while no decode or unified instance is ready.
"""

import asyncio
import time

from baton_serve.contracts.messages import ErrorCode, Generate
from baton_serve.engine.core.outputs import CompletedBlocks, SequenceOutput
from baton_serve.services.instance.attempt_table import AttemptEntry
from baton_serve.services.instance.engine_thread import EngineCalls
from baton_serve.services.instance.errors import RequestFailed
from baton_serve.services.instance.kv_sharing.prompt_image_source import PromptImageSource
from baton_serve.services.instance.kv_sharing.pulling import PullPort


async def await_grammar(engine: EngineCalls, request: AttemptEntry) -> None:
    """Wait until the grammar (structured output) of a request is compiled, which may take seconds. Return immediately
    if the request has no grammar.

    The attempt then holds the compiled grammar until it ends. The request must be added to the engine only then: a step
    waits for the grammars of all its sequences. Raises `engine.errors.RequestError` if the grammar is invalid.
    """
    grammar = request.work.sampling.grammar
    if grammar is not None:
        compiled = await engine.call(lambda e: e.compile_grammar(grammar))
        # Shielded: other requests may wait for the same compilation.
        request.grammar = await asyncio.shield(asyncio.wrap_future(compiled))


class GenerationObserver:
    """Follows a request that this instance decodes, only to learn of its end. Implements `RequestObserver`."""

    def __init__(self) -> None:
        self._end: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def completed(self, blocks: CompletedBlocks) -> None:
        """Do nothing: no other instance fetches the blocks of this request."""

    def completed_layer_groups(self, blocks: CompletedBlocks, parts: range) -> None:
        """Do nothing: no other instance fetches layer groups of this request."""

    def token(self, output: SequenceOutput) -> None:
        """Do nothing: the tokens are sent to the router elsewhere (`AttemptTable.apply`)."""

    def held(self, at: float) -> None:
        """Do nothing: only requests of prefill instances keep their blocks after the prompt."""

    def ended(self) -> None:
        """Let `wait` return, because all sequences have ended."""
        if not self._end.done():
            self._end.set_result(time.monotonic())

    def failed(self, code: ErrorCode, message: str) -> None:
        """Let `wait` raise `RequestFailed`, because the engine failed the request."""
        if not self._end.done():
            self._end.set_exception(RequestFailed(code, message))

    @property
    def is_over(self) -> bool:
        """Return whether all sequences of the request have ended without an error."""
        return self._end.done() and not self._end.cancelled() and self._end.exception() is None

    async def wait(self) -> float:
        """Wait until all sequences of the request have ended and return that time (`time.monotonic()`).

        Raises `RequestFailed` if the engine failed the request.
        """
        return await self._end


async def generate(
    engine: EngineCalls,
    request: AttemptEntry,
    puller: PullPort,
    message: Generate,
    images: PromptImageSource | None = None,
) -> None:
    """Compute the prompt and generate all sequences of a request on this instance; return when they have ended. Before
    that, `puller` fetches the cached prefix from the instance that `message` names, if any, and `images` gets the
    prompt's images. Raises `engine.errors.RequestError` if the request can never be computed.
    """
    work = request.work
    await await_grammar(engine, request)
    await puller.pull(request, message.pull)
    observer = GenerationObserver()
    request.progress = observer
    try:
        await (images or PromptImageSource()).add(engine, request, message, mode="generate")
        await observer.wait()
    finally:
        # Cancelled or failed outside the engine. If `add` did not succeed, the engine ignores the unknown id.
        if request.is_admitted and not observer.is_over:
            engine.post(lambda e: e.cancel(work.request_id))

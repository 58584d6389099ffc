"""`AsyncLLMEngine`: an `LLMEngine` for coroutines. The engine runs in a thread of its own, and only this thread uses
it.

Coroutines send it functions through a queue; it sends outputs back with `call_soon_threadsafe`.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

from baton_serve.engine.errors import EngineError
from baton_serve.engine.offline.engine_args import EngineArgs
from baton_serve.engine.offline.llm_engine import LLMEngine
from baton_serve.engine.offline.outputs import RequestOutput
from baton_serve.engine.offline.params import SamplingParams
from baton_serve.engine.offline.prompts import Prompt
from baton_serve.engine.offline.requested_adapters import LoRARequest

logger = logging.getLogger(__name__)

_Update = RequestOutput | Exception
_Notify = Callable[[_Update], None]


class AsyncLLMEngine:
    """vLLM's asynchronous engine: `AsyncLLMEngine.from_engine_args(EngineArgs("/models/llama"))`. Call `shutdown` at
    the end.
    """

    def __init__(self, engine: LLMEngine) -> None:
        """Become the owner of `engine`, which `shutdown` closes, and start its thread."""
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._listeners: dict[str, _Notify] = {}
        self._closing = threading.Lock()
        self._is_closed = False
        """The thread accepts no more commands. Guarded by `_closing`."""
        self._is_over = False
        """The loop must end. Written by the engine thread only."""
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "AsyncLLMEngine":
        """Load the model. Raises the same errors as `LLMEngine()`."""
        return cls(LLMEngine.from_engine_args(engine_args))

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the whole answer so far, whenever there are new tokens.

        Closing the generator ends the request. Raises what `LLMEngine.add_request` raises, and `EngineError` if the
        request fails later or is aborted.
        """
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[_Update] = asyncio.Queue()

        def notify(one: _Update) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nothing waits for the output
                loop.call_soon_threadsafe(news.put_nowait, one)

        def add() -> None:
            self._engine.add_request(request_id, prompt, sampling_params, lora_request=lora_request, priority=priority)

        # The engine thread has ended, so nothing would ever answer: raise the reason.
        if not self._send_command(lambda: self._begin(request_id, add, notify)):
            self._check()
        try:
            while True:
                found = await news.get()
                if isinstance(found, Exception):
                    raise found
                yield found
                if found.finished:
                    return
        finally:
            # Also after the last output, where it does nothing: the generator may have been closed early.
            self._send_command(lambda: self._end(request_id, notify))

    async def abort(self, request_id: str) -> None:
        """End a request, whose `generate` then raises `EngineError`. An id that is unknown or has ended is ignored."""
        self._send_command(lambda: self._abort(request_id))

    async def check_health(self) -> None:
        """Return if the engine can take requests. Raises `EngineError` if it has failed or was shut down."""
        self._check()

    async def get_tokenizer(self) -> Any:
        """Return the tokenizer, of transformers."""
        return self._engine.get_tokenizer()

    def shutdown(self) -> None:
        """End the thread and close the engine. Running requests fail with `EngineError`. Further calls do nothing."""
        self._send_command(self._stop)
        self._thread.join()

    def _check(self) -> None:
        if self._error is not None:
            raise EngineError(f"the engine has failed: {self._error}") from self._error
        if self._is_over:
            raise EngineError("the engine was shut down")

    def _send_command(self, command: Callable[[], None]) -> bool:
        """Queue a function for the engine thread. Return False if the thread has ended."""
        # Without the lock a command could be queued after the thread has emptied the queue, and never run.
        with self._closing:
            if not self._is_closed:
                self._commands.put(command)
            return not self._is_closed

    def _run(self) -> None:
        """Run commands and steps until `shutdown` or a failure, then fail what is left and close the engine."""
        try:
            while not self._is_over:
                self._run_commands()
                if not self._is_over:
                    self._step()
        except Exception as exc:
            logger.exception("the engine has failed")
            self._error = exc
        finally:
            self._is_over = True
            for notify in self._listeners.values():
                # No request may wait forever for an engine that has ended.
                notify(EngineError("the engine was shut down" if self._error is None else f"it failed: {self._error}"))
            self._listeners.clear()
            with self._closing:
                self._is_closed = True
            # Callers that queued a command before `_is_closed` was set still wait for an answer.
            while not self._commands.empty():
                self._commands.get()()
            self._engine.close()

    def _run_commands(self) -> None:
        """Run all queued commands. Without any request, wait for the next command."""
        while not self._engine.has_unfinished_requests() or not self._commands.empty():
            self._commands.get()()
            if self._is_over:
                return

    def _step(self) -> None:
        """Run one step, and send each request its new output or its error."""
        stepped = self._engine.advance()
        for request_id, error in stepped.failed.items():
            self._listeners.pop(request_id)(error)
        for request_id in stepped.changed:
            # Ended requests are sent once, below, with their complete output.
            if request_id not in stepped.ended:
                self._listeners[request_id](self._engine.look(request_id))
        for request_id in stepped.ended:
            self._listeners.pop(request_id)(self._engine.take(request_id))

    def _begin(self, request_id: str, add: Callable[[], None], notify: _Notify) -> None:
        """Add a request. If this fails, send the error to its caller."""
        try:
            self._check()
            add()
        except Exception as exc:  # noqa: BLE001 - it ends this request only, and is raised in its `generate`
            notify(exc)
        else:
            self._listeners[request_id] = notify

    def _end(self, request_id: str, notify: _Notify) -> None:
        """End a request whose generator was closed, unless it has ended already or another one uses its id now."""
        if self._listeners.get(request_id) is notify:
            del self._listeners[request_id]
            self._engine.abort_request(request_id)

    def _abort(self, request_id: str) -> None:
        notify = self._listeners.get(request_id)
        if notify is not None:
            self._end(request_id, notify)
            notify(EngineError(f"request {request_id} was aborted"))

    def _stop(self) -> None:
        self._is_over = True

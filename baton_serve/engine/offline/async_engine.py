"""`AsyncLLMEngine`: an `LLMEngine` for coroutines, in a thread of its own. The engine runs in a thread of its own, and
only this thread uses it.

Coroutines send it functions through a queue; it sends outputs back with `call_soon_threadsafe`.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any, Generic, Literal, TypeVar

from baton_serve.contracts import pooling
from baton_serve.engine.errors import ConfigError, EngineError
from baton_serve.engine.offline.engine_args import EngineArgs, ModelConfig, open_model
from baton_serve.engine.offline.llm_engine import LLMEngine
from baton_serve.engine.offline.outputs import PoolingRequestOutput, RequestOutput
from baton_serve.engine.offline.pooler import OfflinePooler
from baton_serve.engine.offline.pooling_queue import PoolingQueue, WaitingInput
from baton_serve.engine.offline.prompts import Prompt, parse_prompts
from baton_serve.engine.offline.request_params import PoolingParams, SamplingParams
from baton_serve.engine.offline.requested_adapters import LoRARequest
from baton_serve.engine.pooling.engine import PoolingEngine

logger = logging.getLogger(__name__)

_Update = RequestOutput | Exception
_Notify = Callable[[_Update], None]
T = TypeVar("T")


class AsyncLLMEngine:
    """An engine with vLLM's asynchronous interface: `AsyncLLMEngine.from_engine_args(EngineArgs("/models/llama"))`,
    then `generate` or `encode`. Call `shutdown` at the end."""

    def __init__(self, engine: LLMEngine | PoolingQueue) -> None:
        """Start the thread that runs `engine`. This object owns the engine from now on, and `shutdown` closes it."""
        self._model = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._listeners: dict[str, _Notify] = {}
        self._closing = threading.Lock()
        self._is_closed = False
        """The thread accepts no more commands. Guarded by `_closing`."""
        self._is_over = False
        """The loop must end. Written by the engine thread only."""
        self._is_paused = False
        """No step runs until `resume_generation`. Written by the engine thread only."""
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "AsyncLLMEngine":
        """Load the model in `engine_args`, and return an engine that serves coroutines. Raises the same errors as
        `LLM()`."""
        found = open_model(engine_args)
        if found.kind == "generate":
            return cls(LLMEngine(found))
        return cls(PoolingQueue(OfflinePooler(PoolingEngine(found.config, found.kind), found)))

    @property
    def _engine(self) -> LLMEngine:
        """The engine that generates text. Raises `ConfigError` for a pooling model."""
        if isinstance(self._model, PoolingQueue):
            raise ConfigError("this is a pooling model: use encode")
        return self._model

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the answer to a prompt whenever it has new tokens: the whole answer so far, or what `output_kind` asks
        for. `sampling_params` None takes the model's defaults.

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

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None,
        request_id: str,
        *,
        pooling_task: pooling.PoolingTask | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Yield the result of a pooling model for one input, once. Inputs of several coroutines are computed together.
        `pooling_params` None takes the model's defaults, and `pooling_task` None the first task that the model
        supports.

        Raises `ConfigError` for a model that generates text, and `RequestError` for an input that does not fit.
        """
        queue = self._model
        if not isinstance(queue, PoolingQueue):
            raise ConfigError("this model generates text: use generate, or load it with task='embed'")
        given = parse_prompts(prompt)
        if len(given) != 1:
            raise ConfigError("encode takes one prompt")
        answer: _Answer[PoolingRequestOutput] = _Answer()
        params = pooling_params or PoolingParams()
        call = WaitingInput(request_id, given[0], params, pooling_task, answer.notify)
        if not self._send_command(lambda: self._guard(lambda: queue.add(call), answer.notify)):
            self._check()
        try:
            yield await answer.future
        finally:
            self._send_command(lambda: queue.remove(request_id))

    async def abort(self, request_id: str) -> None:
        """End the request with this id: its generator from `generate` raises `EngineError`. An id that is unknown or
        has ended is ignored."""
        self._send_command(lambda: self._abort(request_id))

    async def pause_generation(self, *, mode: Literal["abort", "keep"] = "abort", clear_cache: bool = True) -> None:
        """Run no further step until `resume_generation`; new requests wait until then.

        With mode "abort" running requests fail with `EngineError`, with "keep" they continue after the pause.
        `clear_cache` forgets cached prefixes, because weights that are changed meanwhile would make them wrong; running
        requests keep theirs.
        """
        if mode not in ("abort", "keep"):
            raise ConfigError(f"pause_generation: mode is {mode!r}; give abort or keep")

        def pause() -> None:
            engine = self._engine
            self._is_paused = True
            for request_id in [] if mode == "keep" else list(self._listeners):
                self._abort(request_id)
            if clear_cache:
                engine.reset_prefix_cache()

        await self._call(pause)

    async def resume_generation(self) -> None:
        """Run steps again after `pause_generation`: requests that were kept or added meanwhile go on."""

        def resume() -> None:
            self._is_paused = False

        await self._call(resume)

    async def is_paused(self) -> bool:
        """Return whether no steps run: `pause_generation` was called, and `resume_generation` was not called since."""
        return self._is_paused

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached KV blocks that no request uses. Return True if no cached block is left."""
        return await self._call(lambda: self._engine.reset_prefix_cache())

    async def start_profile(self) -> None:
        """Start a recording with torch's profiler, as `LLMEngine.start_profile` does. It raises the same errors."""
        await self._call(lambda: self._engine.start_profile())

    async def stop_profile(self) -> None:
        """End the recording of `start_profile`, and write the trace. Raises `UsageError` if no recording runs."""
        await self._call(lambda: self._engine.stop_profile())

    async def do_log_stats(self) -> None:
        """Log the number of requests and the use of the KV cache, in one line."""
        await self._call(lambda: self._engine.do_log_stats())

    async def get_model_config(self) -> ModelConfig:
        """Return the settings of the model, such as its dtype and longest context, under vLLM's names."""
        return await self._call(lambda: self._engine.get_model_config())

    @property
    def is_running(self) -> bool:
        """True while the engine accepts requests: it was not shut down and has not failed."""
        return not self._is_over

    @property
    def is_stopped(self) -> bool:
        """True after the engine has failed or was shut down."""
        return self._is_over

    @property
    def errored(self) -> bool:
        """True after the engine has failed with an error."""
        return self._error is not None

    @property
    def dead_error(self) -> EngineError:
        """The error that callers get after the engine has failed or was shut down."""
        return EngineError("the engine was shut down" if self._error is None else f"it failed: {self._error}")

    async def check_health(self) -> None:
        """Raise `EngineError` if the engine has failed or was shut down; otherwise do nothing."""
        self._check()

    async def get_tokenizer(self) -> Any:
        """Return the model's tokenizer, an object of transformers."""
        return self._engine.get_tokenizer()

    def shutdown(self) -> None:
        """End the engine's thread and free the model. Running requests fail with `EngineError`. Further calls do
        nothing."""
        self._send_command(self._stop)
        self._thread.join()

    def _check(self) -> None:
        if self._error is not None:
            raise EngineError(f"the engine has failed: {self._error}") from self._error
        if self._is_over:
            raise EngineError("the engine was shut down")

    async def _call(self, function: Callable[[], T]) -> T:
        """Run a function in the engine thread and return its result. Raises the function's error, or `EngineError` if
        the engine has failed or was shut down."""
        answer: _Answer[T] = _Answer()
        if not self._send_command(lambda: self._guard(lambda: answer.notify(function()), answer.notify)):
            self._check()
        return await answer.future

    def _guard(self, function: Callable[[], object], notify: Callable[[Exception], None]) -> None:
        """Call a function in the engine thread. If it raises an error, pass the error to `notify`: it must not end the
        engine."""
        try:
            self._check()
            function()
        except Exception as exc:  # noqa: BLE001 - it is raised in the coroutine that called
            notify(exc)

    def _send_command(self, command: Callable[[], None]) -> bool:
        """Queue a function to be called in the engine thread. Return False if this thread has ended, so that it will
        not be called."""
        # Without the lock a command could be queued after the thread has emptied the queue, and never run.
        with self._closing:
            if not self._is_closed:
                self._commands.put(command)
            return not self._is_closed

    def _run(self) -> None:
        """Run the engine thread: call queued functions and run steps until `shutdown` or a failure. Then fail all
        requests that are left and close the engine."""
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
                notify(self.dead_error)
            self._listeners.clear()
            with self._closing:
                self._is_closed = True
            # Callers that queued a command before `_is_closed` was set still wait for an answer.
            while not self._commands.empty():
                self._commands.get()()
            self._model.close()

    def _run_commands(self) -> None:
        """Call all queued functions. Without any request, or while generation is paused, wait for the next function."""
        while self._is_paused or not self._has_requests() or not self._commands.empty():
            self._commands.get()()
            if self._is_over:
                return

    def _has_requests(self) -> bool:
        model = self._model
        return model.has_calls if isinstance(model, PoolingQueue) else model.has_unfinished_requests()

    def _step(self) -> None:
        """Run one step, and pass each request's new output or error to its coroutine."""
        if isinstance(self._model, PoolingQueue):
            self._model.step()
            return
        stepped = self._engine.advance()
        for request_id, error in stepped.failed.items():
            self._listeners.pop(request_id)(error)
        for request_id in stepped.changed:
            # Ended requests are sent once, below, with their complete output.
            output = None if request_id in stepped.ended else self._engine.next_output(request_id)
            if output is not None:
                self._listeners[request_id](output)
        for request_id in stepped.ended:
            output = self._engine.next_output(request_id)
            self._engine.abort_request(request_id)
            assert output is not None  # every kind of output has the end of an answer
            self._listeners.pop(request_id)(output)

    def _begin(self, request_id: str, add: Callable[[], None], notify: _Notify) -> None:
        """Add a request by calling `add`, and let `notify` get its outputs. If `add` fails, `notify` gets the error."""

        def begin() -> None:
            add()
            self._listeners[request_id] = notify

        self._guard(begin, notify)

    def _end(self, request_id: str, notify: _Notify) -> None:
        """End a request whose generator was closed. Do nothing if it has ended already, or if another request uses its
        id now."""
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


class _Answer(Generic[T]):
    """A future of the running event loop that the engine thread completes."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self._loop.create_future()

    def notify(self, result: T | Exception) -> None:
        """Complete the future with a result or an error. The engine thread calls this."""
        with contextlib.suppress(RuntimeError):  # the loop was closed: nothing waits for the result
            self._loop.call_soon_threadsafe(self._complete, result)

    def _complete(self, result: T | Exception) -> None:
        if self.future.done():  # the caller was cancelled
            return
        if isinstance(result, Exception):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


AsyncLLM = AsyncLLMEngine
"""The name of the class in newer versions of vLLM."""

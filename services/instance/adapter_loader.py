"""Loads and unloads LoRA adapters while an instance serves; whether one is accepted, is decided in
`engine/model/lora/store.py`.

Files are read beside the engine and the weights are added between two steps. Changes run one at a time in the order of
the requests. Every router receives a load report with the change before the router that requested it gets its answer.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from baton_serve.contracts.messages import AdapterChanged, AdapterRefusal, LoadAdapter, UnloadAdapter
from baton_serve.engine import Engine, EngineError
from baton_serve.engine.errors import AdapterError
from baton_serve.engine.model.lora.loaded_adapters import LoadedAdapters
from baton_serve.services.common.rpc.instance_link import RouterId
from baton_serve.services.instance.engine_thread import EngineThread
from baton_serve.services.instance.errors import EngineBroken
from baton_serve.services.instance.interfaces import RouterPort

logger = logging.getLogger(__name__)

UNLOADED_ADAPTER_GRACE_S = 60.0
"""Seconds for which the weights of an unloaded adapter stay in memory. Requests that routers had placed before they
learned of the change still find them."""


class AdapterLoader:
    """Loads and unloads the LoRA adapters of one instance when routers ask for it (`LoadAdapter`, `UnloadAdapter`). Use
    it only on the event loop.

    `announce` publishes the current list of adapters to routers and registry.
    """

    def __init__(
        self,
        adapters: LoadedAdapters,
        *,
        engine: EngineThread[Engine],
        router: RouterPort,
        announce: Callable[[], Awaitable[None]],
    ) -> None:
        self._adapters = adapters
        self._engine = engine
        self._router = router
        self._announce = announce
        self._one_at_a_time = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def on_message(self, router: RouterId, message: LoadAdapter | UnloadAdapter) -> None:
        """Apply the change that `message` asks for in a task, and answer `router` with `AdapterChanged` when it is done
        or refused.
        """
        task = asyncio.get_running_loop().create_task(self._answer(router, message), name="adapter")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel all running changes and wait until their tasks have ended. The routers that asked for them get no
        answer.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _answer(self, router: RouterId, message: LoadAdapter | UnloadAdapter) -> None:
        """Apply the change that `message` asks for, after all earlier ones, and answer `router` with
        `AdapterChanged`.
        """
        refusal: AdapterRefusal | None = None
        reason = ""
        # Two changes of one name must not overlap: the check for a known name and the load are not atomic. asyncio's
        # lock is fair, so that the order of the requests is kept.
        async with self._one_at_a_time:
            try:
                if isinstance(message, LoadAdapter):
                    await self._load(message)
                else:
                    await self._unload(message)
            except (EngineError, EngineBroken) as exc:
                refusal, reason = _refusal(message), str(exc)
                logger.warning("cannot change LoRA adapter %s, keeping the previous state: %s", message.name, exc)
        self._router.send(router, AdapterChanged(request_id=message.request_id, refusal=refusal, message=reason))

    async def _load(self, message: LoadAdapter) -> None:
        """Load the adapter that `message` names into the engine. Do nothing if the same one is loaded already.

        Raises `AdapterError` if its name is in use for another folder and the message does not replace it.
        """
        known = next((one for one in self._adapters.records() if one.name == message.name), None)
        # Loading the same adapter again succeeds without effect, so that a router may repeat its request.
        if known is not None and known.path == message.path and not message.in_place:
            return
        if known is not None and not message.in_place:
            raise AdapterError(
                f"adapter name {message.name} is in use by the adapter in {known.path}; unload that one first or"
                " choose another name"
            )
        # Reading weights can take seconds: neither the event loop nor the engine may wait for it.
        adapter = await asyncio.to_thread(self._adapters.read, message.name, message.path)
        await self._engine.call(lambda engine: engine.adapters.put(adapter))
        logger.info("loaded LoRA adapter %s from %s", message.name, message.path)
        # Requests that were placed before the replacement name the old weights.
        if known is not None:
            self._collect_later()
        await self._announce()

    async def _unload(self, message: UnloadAdapter) -> None:
        """Unload the adapter that `message` names; running requests may still use it. Raises `EngineError` if it is not
        loaded.
        """
        await self._engine.call(lambda engine: engine.adapters.unload(message.name))
        logger.info("unloaded LoRA adapter %s", message.name)
        self._collect_later()
        await self._announce()

    def _collect_later(self) -> None:
        """Let the engine free the weights of unloaded and replaced adapters that no request uses any more, after
        `UNLOADED_ADAPTER_GRACE_S` seconds.
        """
        asyncio.get_running_loop().call_later(
            UNLOADED_ADAPTER_GRACE_S, self._engine.post, lambda engine: engine.adapters.collect()
        )


def _refusal(message: LoadAdapter | UnloadAdapter) -> AdapterRefusal:
    """Return the kind of refusal for a change that failed: `not_found` if the folder or the adapter is missing, else
    `invalid`.
    """
    is_missing = isinstance(message, UnloadAdapter) or not Path(message.path).is_dir()
    # The HTTP status depends on it: a missing folder or name is a 404, a broken adapter a 400.
    return "not_found" if is_missing else "invalid"

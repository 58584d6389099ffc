"""Adapters that come and go while an instance serves: read beside the engine, put in between two steps.

One change at a time, in the order in which routers ask. Every router hears of a change before the one that asked for it
hears that it is done.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from baton_serve.contracts.messages import AdapterChanged, AdapterRefusal, LoadAdapter, UnloadAdapter
from baton_serve.engine import Engine, EngineError
from baton_serve.engine.errors import AdapterError
from baton_serve.engine.model.lora.loaded import LoadedAdapters
from baton_serve.services.common.zmq.rpc import RouterId
from baton_serve.services.instance.engine_thread import EngineThread
from baton_serve.services.instance.errors import EngineBroken
from baton_serve.services.instance.ports import RouterPort

logger = logging.getLogger(__name__)

UNLOADED_ADAPTER_GRACE_S = 60.0
"""Requests that routers had placed before they heard of an unloaded adapter find its weights for so long."""


class AdapterLoader:
    """`announce` tells routers and registry of the adapters that there are now."""

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
        task = asyncio.get_running_loop().create_task(self._answer(router, message), name="adapter")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _answer(self, router: RouterId, message: LoadAdapter | UnloadAdapter) -> None:
        refusal: AdapterRefusal | None = None
        reason = ""
        async with self._one_at_a_time:
            try:
                if isinstance(message, LoadAdapter):
                    await self._load(message)
                else:
                    await self._unload(message)
            except (EngineError, EngineBroken) as exc:
                refusal, reason = _refusal(message), str(exc)
                logger.warning("an adapter stays as it was: %s", exc)
        self._router.send(router, AdapterChanged(request_id=message.request_id, refusal=refusal, message=reason))

    async def _load(self, message: LoadAdapter) -> None:
        known = next((one for one in self._adapters.records() if one.name == message.name), None)
        if known is not None and known.path == message.path:
            return
        if known is not None:
            raise AdapterError(f"the name {message.name} is in use by the adapter of {known.path}")
        adapter = await asyncio.to_thread(self._adapters.read, message.name, message.path)
        await self._engine.call(lambda engine: engine.adapters.put(adapter))
        logger.info("adapter %s is loaded from %s", message.name, message.path)
        await self._announce()

    async def _unload(self, message: UnloadAdapter) -> None:
        await self._engine.call(lambda engine: engine.adapters.unload(message.name))
        logger.info("adapter %s is unloaded", message.name)
        asyncio.get_running_loop().call_later(
            UNLOADED_ADAPTER_GRACE_S, self._engine.post, lambda engine: engine.adapters.collect()
        )
        await self._announce()


def _refusal(message: LoadAdapter | UnloadAdapter) -> AdapterRefusal:
    is_missing = isinstance(message, UnloadAdapter) or not Path(message.path).is_dir()
    return "not_found" if is_missing else "invalid"

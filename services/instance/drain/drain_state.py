"""How an instance stops taking work: asked by a signal, or by an operator over HTTP.

The registry says so first, so that whoever looks sees it; then what runs gets its time to end, what does not is handed
over (its router replays it elsewhere), blocks under a lease are waited for, and hot ones handed on. Whether the process
ends afterwards is for the caller to choose.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Literal, Protocol

logger = logging.getLogger(__name__)

DrainStatus = Literal["ok", "draining", "drained"]


class Drainable(Protocol):
    """`services.instance.request_server.Serving`."""

    @property
    def is_draining(self) -> bool: ...
    @property
    def num_requests(self) -> int: ...
    def refuse_new(self) -> None: ...
    async def drain(self, timeout_s: float) -> None: ...


class DrainController:
    """`announce` renews the registry's record; `request_stop` ends the process by way of `finish`."""

    def __init__(
        self,
        serving: Drainable,
        *,
        announce: Callable[[], Awaitable[None]],
        request_stop: Callable[[str], None],
        timeout_s: float,
        hand_on: Callable[[], Awaitable[None]],
    ) -> None:
        """`hand_on`: called once, when all requests have ended; it bounds itself."""
        self._hand_on = hand_on
        self._handing: asyncio.Task[None] | None = None
        self._serving = serving
        self._announce = announce
        self._request_stop = request_stop
        self._timeout_s = timeout_s
        self._task: asyncio.Task[None] | None = None

    @property
    def state(self) -> DrainStatus:
        if not self._serving.is_draining:
            return "ok"
        return "draining" if self._serving.num_requests else "drained"

    async def begin(self) -> None:
        """Refuses new work. The registry is told if it answers; routers that are connected hear of it at once."""
        if not self._serving.is_draining:
            logger.info("draining", extra={"requests": self._serving.num_requests})
            self._serving.refuse_new()
            await self._announce()

    async def finish(self) -> None:
        """Returns when nothing is left."""
        await self._serving.drain(self._timeout_s)
        if self._handing is None:
            self._handing = asyncio.create_task(_all_of(self._hand_on), name="handover")
        await asyncio.shield(self._handing)

    async def ask(self, *, exit_afterwards: bool) -> None:
        """An operator's wish: begins now, and goes on after this returns."""
        await self.begin()
        if exit_afterwards:
            self._request_stop("drained on request")
        elif self._task is None:
            self._task = asyncio.create_task(self.finish(), name="drain")


async def _all_of(action: Callable[[], Awaitable[None]]) -> None:
    await action()

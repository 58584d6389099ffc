"""Decides the course of a drain, started by SIGTERM or an operator: announce, finish running requests, migrate blocks,
leave.

The instance first announces in the registry that it drains. Then running requests get time to finish; the remaining
ones end and their routers replay them elsewhere. Blocks under a lease are waited for, and the most used blocks are
handed to another instance. The caller chooses whether the process ends afterwards.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Literal, Protocol

logger = logging.getLogger(__name__)

DrainStatus = Literal["ok", "draining", "drained"]


class Drainable(Protocol):
    """The methods of an instance's server (`DrainableServer`) that a drain calls."""

    @property
    def is_draining(self) -> bool: ...
    @property
    def num_requests(self) -> int: ...
    def refuse_new(self) -> None: ...
    async def drain(self, timeout_s: float) -> None: ...


class DrainController:
    """Runs the drain of one instance process, once. `announce` renews the record in the registry, to show the drain
    there. `request_stop` starts the shutdown of the process, which calls `begin` and `finish`. Use it only on the event
    loop.
    """

    def __init__(
        self,
        serving: Drainable,
        *,
        announce: Callable[[], Awaitable[None]],
        request_stop: Callable[[str], None],
        timeout_s: float,
        migrate_out: Callable[[], Awaitable[None]],
    ) -> None:
        """Prepare the drain of `serving`, the instance's server; running requests get `timeout_s` seconds.
        `migrate_out` moves the most used blocks to another instance. It is called once, after all requests have ended,
        and must limit its own duration. `announce` shows the drain in the registry, and `request_stop` starts the
        shutdown of the process.
        """
        self._migrate_out = migrate_out
        self._migrating: asyncio.Task[None] | None = None
        self._serving = serving
        self._announce = announce
        self._request_stop = request_stop
        self._timeout_s = timeout_s
        self._task: asyncio.Task[None] | None = None

    @property
    def state(self) -> DrainStatus:
        """Return the state of the drain for `GET /health`: `ok` without a drain, `draining` while requests run, then
        `drained`.
        """
        if not self._serving.is_draining:
            return "ok"
        return "draining" if self._serving.num_requests else "drained"

    async def begin(self) -> None:
        """Refuse new requests from now on, and show that to connected routers immediately and in the registry if it
        answers.
        """
        if not self._serving.is_draining:
            logger.info(
                "draining: running requests have up to %g s left (--drain-timeout-s)",
                self._timeout_s,
                extra={"requests": self._serving.num_requests},
            )
            self._serving.refuse_new()
            await self._announce()

    async def finish(self) -> None:
        """Wait until all requests have ended, and then until the most used blocks have been moved to
        another instance.
        """
        await self._serving.drain(self._timeout_s)
        # An operator's drain and the shutdown may both call this: the blocks are handed on only once. The shield keeps
        # the hand-over running if one of the two callers is cancelled.
        if self._migrating is None:
            self._migrating = asyncio.create_task(_all_of(self._migrate_out), name="drain migration")
        await asyncio.shield(self._migrating)

    async def ask(self, *, exit_afterwards: bool) -> None:
        """Start a drain that an operator requested. Return when new requests are refused; the drain goes on. With
        `exit_afterwards` the process exits at its end.
        """
        await self.begin()
        # The shutdown calls `finish` itself.
        if exit_afterwards:
            self._request_stop("drained on request")
        elif self._task is None:
            self._task = asyncio.create_task(self.finish(), name="drain")


async def _all_of(action: Callable[[], Awaitable[None]]) -> None:
    await action()

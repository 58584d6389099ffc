"""What callers used, exchanged between routers through a store a few times a second; never on a request's path.

While the store is away each router counts alone.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from baton_serve.services.common.errors import RegistryUnavailable
from baton_serve.services.common.lifecycle import cancel_all
from baton_serve.services.router.quota.usage import UsageLedger, WindowUsage

logger = logging.getLogger(__name__)

EXCHANGE_S = 0.5


class UsageStore(Protocol):
    async def exchange(self, own: Sequence[WindowUsage]) -> list[WindowUsage]:
        """Tells what this router counted; returns what all others did. Raises `RegistryUnavailable`."""

    async def close(self) -> None: ...


class UsageExchange:
    """Runs from `start` to `close`."""

    def __init__(self, ledger: UsageLedger, store: UsageStore, *, wall_clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._store = store
        self._wall_clock = wall_clock
        self._is_store_away = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="usage")

    async def close(self) -> None:
        if self._task is not None:
            await cancel_all([self._task])
        await self.exchange()
        await self._store.close()

    async def exchange(self) -> None:
        own = self._ledger.own(self._wall_clock())
        if not own:
            return
        try:
            self._ledger.merge_others(await self._store.exchange(own))
        except RegistryUnavailable as exc:
            if not self._is_store_away:
                logger.warning("limits of keys are counted by this router alone: %s", exc)
            self._is_store_away = True
        else:
            self._is_store_away = False

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(EXCHANGE_S)
            await self.exchange()

"""Exchange the usage of API keys between routers through a store, in the background, twice a second.

No request waits for it. While the store cannot be reached, each router counts alone, so that N routers together may let
through N times a limit.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from baton_serve.services.common.errors import RegistryUnavailable
from baton_serve.services.common.process_lifecycle import cancel_all
from baton_serve.services.router.quota.usage_limits import UsageLedger, WindowUsage

logger = logging.getLogger(__name__)

EXCHANGE_S = 0.5
"""Pause between two exchanges, in seconds."""


class UsageStore(Protocol):
    """Adds up what callers have used on several routers. `RedisUsageStore` does it in Redis, `SiblingRpc` for the
    processes of one router.
    """

    async def exchange(self, own: Sequence[WindowUsage]) -> list[WindowUsage]:
        """Store what this router has counted. Return the sums of all other routers, for the same windows in the same
        order.

        Raises `RegistryUnavailable` if the store does not answer.
        """

    async def close(self) -> None:
        """Close the connection to the store."""
        ...


class UsageExchange:
    """Exchanges the usage of API keys with other routers from time to time, from `start` to `close`, for one router
    process. It owns the store.
    """

    def __init__(self, ledger: UsageLedger, store: UsageStore, *, wall_clock: Callable[[], float]) -> None:
        """Create the exchange without starting it. `ledger` has the counts of this process; `wall_clock` returns
        seconds since 1970, because windows must be the same for all routers.
        """
        self._ledger = ledger
        self._store = store
        self._wall_clock = wall_clock
        self._is_store_away = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to exchange usage with other routers in the background."""
        self._task = asyncio.create_task(self._run(), name="usage")

    async def close(self) -> None:
        """Stop the background task, exchange usage a last time, and close the store."""
        if self._task is not None:
            await cancel_all([self._task])
        # Without it the other routers would never count what this one served since the last exchange.
        await self.exchange()
        await self._store.close()

    async def exchange(self) -> None:
        """Send what this router has counted to the store once, and take over the sums of all other routers.

        If the store does not answer, keep the previous sums.
        """
        own = self._ledger.own(self._wall_clock())
        if not own:
            return
        try:
            self._ledger.merge_others(await self._store.exchange(own))
        except RegistryUnavailable as exc:
            # Logged once per outage: this runs twice a second.
            if not self._is_store_away:
                logger.warning("usage of API keys is not exchanged, each router applies the limits alone: %s", exc)
            self._is_store_away = True
        else:
            self._is_store_away = False

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(EXCHANGE_S)
            await self.exchange()

"""Keeps this instance's record in the registry: renewed with fresh load, removed when the instance leaves.

A registry that is away changes nothing for requests: the instance serves on and tries again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from baton_serve.contracts.instance import InstanceRecord
from baton_serve.services.common.errors import RegistryUnavailable, Superseded
from baton_serve.services.common.lifecycle import cancel_all
from baton_serve.services.common.registry import RegistryClient

logger = logging.getLogger(__name__)

RETRY_S = 1.0


class Registration:
    """`record` is asked for at each renewal. `on_superseded`: a newer process has this instance's name."""

    def __init__(
        self,
        client: RegistryClient,
        *,
        record: Callable[[], InstanceRecord],
        ttl_s: float,
        on_superseded: Callable[[], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._client = client
        self._record = record
        self._ttl_s = ttl_s
        self._on_superseded = on_superseded
        self._sleep = sleep
        self._is_away = False
        self._is_superseded = False
        self._renewing: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._renewing = asyncio.create_task(self._renew_for_ever(), name="membership")

    async def announce(self) -> None:
        """Renews now, because something of the record has changed that others must know soon."""
        await self._renew()

    async def leave(self) -> None:
        """Stops renewing and removes the record, if the registry answers."""
        if self._renewing is not None:
            await cancel_all([self._renewing])
        record = self._record()
        try:
            await self._client.leave(record.instance, record.generation)
        except RegistryUnavailable as exc:
            logger.warning("could not leave the registry, the record will expire: %s", exc)
        await self._client.close()

    async def _renew_for_ever(self) -> None:
        while await self._renew():
            await self._sleep(min(RETRY_S, self._ttl_s / 3) if self._is_away else self._ttl_s / 3)

    async def _renew(self) -> bool:
        """False: never again."""
        if self._is_superseded:
            return False
        try:
            await self._client.register(self._record(), self._ttl_s)
        except RegistryUnavailable as exc:
            if not self._is_away:
                logger.warning("the registry is away, serving on: %s", exc)
            self._is_away = True
        except Superseded:
            self._is_superseded = True
            self._on_superseded()
            return False
        else:
            if self._is_away:
                logger.info("the registry is back")
            self._is_away = False
        return True

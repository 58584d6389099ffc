"""Keeps this instance's record in the registry: renews it with the current load and removes it at shutdown.

If the registry is unavailable, the instance continues to serve requests and retries.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from baton_serve.contracts.instance import InstanceRecord
from baton_serve.services.common.errors import RegistryUnavailable, Superseded
from baton_serve.services.common.process_lifecycle import cancel_all
from baton_serve.services.common.registry import RegistryClient

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Longest time between two attempts, in seconds, while the registry is unavailable."""


class Registration:
    """Keeps the registry record of one instance alive, from `start` until `leave`. Use it only on the event loop.

    `record` returns the present record for each renewal; the record expires `ttl_s` seconds after the last renewal.
    `on_superseded` is called once if a newer process has registered under the same instance id; then the record is
    never renewed again.
    """

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
        self._one_at_a_time = asyncio.Lock()
        self._is_away = False
        self._is_superseded = False
        self._renewing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start a task that renews the record every third of `ttl_s`, until `leave` is called."""
        self._renewing = asyncio.create_task(self._renew_for_ever(), name="membership")

    async def announce(self) -> None:
        """Renew the record now, because a changed field (such as `draining`) must reach the routers soon. An
        unavailable registry is only logged.
        """
        await self._renew()

    async def leave(self) -> None:
        """Stop renewing the record, and remove it if the registry answers."""
        if self._renewing is not None:
            await cancel_all([self._renewing])
        # The generation in the request keeps a restarted instance's new record from being removed.
        record = self._record()
        try:
            await self._client.leave(record.instance, record.generation)
        except RegistryUnavailable as exc:
            logger.warning("cannot remove the record from the registry, it will expire: %s", exc)
        await self._client.close()

    async def _renew_for_ever(self) -> None:
        while await self._renew():
            # A third of the TTL: two renewals may fail before the record expires. While the registry is away, retry
            # sooner, so that routers see this instance again shortly after it is back.
            await self._sleep(min(RETRY_S, self._ttl_s / 3) if self._is_away else self._ttl_s / 3)

    async def _renew(self) -> bool:
        """Send the present record to the registry once. Return False if it must never be renewed again, because a newer
        process has the same instance id.
        """
        # One at a time: the record of an older generation must not arrive behind that of a newer one.
        async with self._one_at_a_time:
            return await self._register()

    async def _register(self) -> bool:
        if self._is_superseded:
            return False
        try:
            await self._client.register(self._record(), self._ttl_s)
        except RegistryUnavailable as exc:
            # Log the transition only, not every failed attempt.
            if not self._is_away:
                logger.warning("the registry is unavailable, retrying and serving requests meanwhile: %s", exc)
            self._is_away = True
        except Superseded:
            self._is_superseded = True
            self._on_superseded()
            return False
        else:
            if self._is_away:
                logger.info("the registry is available again")
            self._is_away = False
        return True

"""Restarts the instances of pools one by one: the next only when the last one's successor serves.

Knows neither who restarts a process that ended (`baton serve`, Kubernetes, systemd) nor whether its successor keeps its
name: an instance counts as replaced when its generation is gone and as many as before take work.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from baton_serve.contracts.instance import Role
from baton_serve.services.common.errors import RemoteError
from baton_serve.services.rotate.admin_client import (
    AdminRequestError,
    InstanceInfo,
    InstanceSource,
    InstanceState,
    active_instances,
)

POLL_S = 0.2


class RotationError(RemoteError):
    """An instance did not come back: the rest is left alone."""


class InstanceDrainer(Protocol):
    """`services.rotate.admin_client.Instances`."""

    async def drain(self, address: str, *, exit_afterwards: bool) -> None: ...
    async def state(self, address: str) -> InstanceState | None: ...


class Rotation:
    def __init__(
        self,
        source: InstanceSource,
        instances: InstanceDrainer,
        *,
        timeout_s: float,
        say: Callable[[str], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._instances = instances
        self._timeout_s = timeout_s
        self._say = say
        self._sleep = sleep
        self._clock = clock

    async def run(self, roles: Sequence[Role]) -> int:
        """Number of instances that were replaced. Raises `RotationError` or `AdminRequestError` at the first that was
        not."""
        targets = [one for one in await self._source.instances() if one.role in roles and not one.draining]
        for role in roles:
            if sum(one.role == role for one in targets) == 1:
                self._say(f"the {role} pool has one instance: requests wait while it restarts")
        for target in targets:
            await self._replace(target)
        return len(targets)

    async def _replace(self, target: InstanceInfo) -> None:
        began = self._clock()
        wanted = len(active_instances(await self._source.instances(), target.role))
        before = await self._instances.state(target.http_address)
        self._say(f"{target.instance} drains ({before.requests if before else '?'} requests)")
        await self._instances.drain(target.http_address, exit_afterwards=True)
        while not await self._is_replaced(target, wanted, has_routers=bool(before and before.routers)):
            if self._clock() - began > self._timeout_s:
                raise RotationError(
                    f"{target.instance} was drained and no successor serves after {self._timeout_s:g} s; "
                    "the remaining instances are left alone"
                )
            await self._sleep(POLL_S)
        self._say(f"{target.instance} is replaced after {self._clock() - began:.1f} s")

    async def _is_replaced(self, target: InstanceInfo, wanted: int, *, has_routers: bool) -> bool:
        try:
            seen = await self._source.instances()
        except AdminRequestError:
            return False  # a router that restarts too
        serving = active_instances(seen, target.role)
        if any(one.generation == target.generation for one in seen) or len(serving) < wanted:
            return False
        return not has_routers or await self._all_have_routers(serving)

    async def _all_have_routers(self, serving: Sequence[InstanceInfo]) -> bool:
        """A record comes before the first router has connected."""
        states = [await self._instances.state(one.http_address) for one in serving]
        return all(state is not None and state.routers > 0 for state in states)

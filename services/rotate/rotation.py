"""Restarts the instances of pools one after the other, each only after the previous one's successor is ready.

It does not depend on what restarts the processes (`baton serve`, Kubernetes, systemd), nor on the successor's name. An
instance counts as replaced when its generation has disappeared and the pool has as many active instances as before.
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
"""Time between two looks at the list of instances."""


class RotationError(RemoteError):
    """No new instance took the place of a drained one in time. The instances that were not drained yet
    go on serving.
    """


class InstanceDrainer(Protocol):
    """The interface that drains instances: `services.rotate.admin_client.InstanceAdmin`, whose docstrings describe the
    methods.
    """

    async def drain(self, address: str, *, exit_afterwards: bool) -> None: ...
    async def state(self, address: str) -> InstanceState | None: ...


class Rotation:
    """Replaces all instances of some pools, one after the other: drains each, and waits until a new one serves in its
    place. Used once, on the event loop.

    `say` prints progress. `timeout_s` limits the seconds for one instance, from its drain until the new one is ready.
    """

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
        """Replace the instances of these roles and return how many instances were replaced.

        Raises `RotationError` or `AdminRequestError` at the first instance that could not be replaced.
        """
        # Instances that are draining already will end anyway, and instances that join later are new.
        targets = [one for one in await self._source.instances() if one.role in roles and not one.draining]
        for role in roles:
            if sum(one.role == role for one in targets) == 1:
                self._say(f"the {role} pool has only one instance: requests wait until it has restarted")
        for target in targets:
            await self._replace(target)
        return len(targets)

    async def _replace(self, target: InstanceInfo) -> None:
        began = self._clock()
        # Counted for each instance again, since the pool may be scaled while it is rotated.
        wanted = len(active_instances(await self._source.instances(), target.role))
        before = await self._instances.state(target.http_address)
        self._say(f"draining {target.instance} ({before.requests if before else '?'} requests are running)")
        await self._instances.drain(target.http_address, exit_afterwards=True)
        while not await self._is_replaced(target, wanted, has_routers=bool(before and before.routers)):
            if self._clock() - began > self._timeout_s:
                raise RotationError(
                    f"{target.instance} was drained, but no successor is ready after {self._timeout_s:g} s "
                    "(--timeout-s); the remaining instances are not restarted"
                )
            await self._sleep(POLL_S)
        self._say(f"{target.instance} was replaced after {self._clock() - began:.1f} s")

    async def _is_replaced(self, target: InstanceInfo, wanted: int, *, has_routers: bool) -> bool:
        try:
            seen = await self._source.instances()
        except AdminRequestError:
            # The router may be restarting at the same time; the timeout ends this if it does not come back.
            return False
        serving = active_instances(seen, target.role)
        if any(one.generation == target.generation for one in seen) or len(serving) < wanted:
            return False
        # A pool that no router had connected to before will not be connected now either.
        return not has_routers or await self._all_have_routers(serving)

    async def _all_have_routers(self, serving: Sequence[InstanceInfo]) -> bool:
        """Return whether each of these instances is connected to a router: an instance registers before the first
        router connects.
        """
        states = [await self._instances.state(one.http_address) for one in serving]
        return all(state is not None and state.routers > 0 for state in states)

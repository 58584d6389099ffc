"""Sequences of one flight that no instance can take now: placed again whenever the cluster changes, for so long."""

import asyncio
from collections.abc import Callable

from baton_serve.services.router.cluster.cluster import Cluster
from baton_serve.services.router.placement.policy import NoCapacity
from baton_serve.services.router.text.token_sequence import TokenSequence


class Patience:
    """`relaunch` gets sequences with the number of their replays; `give_up` hears why the first of those that still
    wait when the time is over could not be placed."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        wait_s: float,
        relaunch: Callable[[list[TokenSequence], int], None],
        give_up: Callable[[NoCapacity], None],
    ) -> None:
        self._cluster = cluster
        self._wait_s = wait_s
        self._relaunch = relaunch
        self._give_up = give_up
        self._groups: list[tuple[list[TokenSequence], int]] = []
        self._unlisten: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def wait(self, group: list[TokenSequence], replays: int, refused: NoCapacity) -> None:
        self._groups.append((group, replays))
        if self._unlisten is None:
            self._unlisten = self._cluster.listen(self._retry)
            self._timer = asyncio.get_running_loop().call_later(self._wait_s, self._over, refused)

    def end(self) -> None:
        self._groups.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._unlisten is not None:
            self._unlisten()
            self._unlisten = None

    def _retry(self) -> None:
        groups, self._groups = self._groups, []
        for group, replays in groups:
            self._relaunch(group, replays)

    def _over(self, refused: NoCapacity) -> None:
        if self._groups:
            self._give_up(refused)
        else:
            self.end()

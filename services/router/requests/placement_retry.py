"""Sequences of one flight that no instance can take now: placed again whenever the cluster changes, for so long."""

import asyncio
from collections.abc import Callable

from baton_serve.contracts.messages import Failed
from baton_serve.services.router.cluster.cluster import Cluster
from baton_serve.services.router.placement.policy import NoCapacity
from baton_serve.services.router.protocol.errors import (
    ApiError,
    BadRequestError,
    DeadlineError,
    InternalError,
    RateLimitError,
    UnavailableError,
)
from baton_serve.services.router.text.token_sequence import TokenSequence


def no_capacity_error(no_capacity: NoCapacity) -> ApiError:
    if no_capacity.reason == "never_fits":
        return BadRequestError(no_capacity.message, code="context_length_exceeded")
    return UnavailableError(no_capacity.message, retry_after_s=1.0)


def failure_error(failed: Failed) -> ApiError:
    """For when replays are used up."""
    match failed.code:
        case "overloaded":
            return RateLimitError("the instances are overloaded", retry_after_s=1.0)
        case "timeout":
            return DeadlineError(failed.message)
        case "internal":
            return InternalError("an instance failed while it served this request")
        case _:
            return UnavailableError(f"the request could not be completed: {failed.message}", code=failed.code)


class PlacementRetry:
    """`place_again` gets sequences with the number of their replays; `give_up` hears why the first of those that still
    wait when the time is over could not be placed."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        wait_s: float,
        place_again: Callable[[list[TokenSequence], int], None],
        give_up: Callable[[NoCapacity], None],
    ) -> None:
        self._cluster = cluster
        self._wait_s = wait_s
        self._place_again = place_again
        self._give_up = give_up
        self._groups: list[tuple[list[TokenSequence], int]] = []
        self._remove_listener: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def add(self, group: list[TokenSequence], replays: int, no_capacity: NoCapacity) -> None:
        self._groups.append((group, replays))
        if self._remove_listener is None:
            self._remove_listener = self._cluster.add_listener(self._retry)
            self._timer = asyncio.get_running_loop().call_later(self._wait_s, self._on_timeout, no_capacity)

    def end(self) -> None:
        self._groups.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._remove_listener is not None:
            self._remove_listener()
            self._remove_listener = None

    def _retry(self) -> None:
        groups, self._groups = self._groups, []
        for group, replays in groups:
            self._place_again(group, replays)

    def _on_timeout(self, no_capacity: NoCapacity) -> None:
        if self._groups:
            self._give_up(no_capacity)
        else:
            self.end()

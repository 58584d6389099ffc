"""Decides how long a request waits for an instance, and the error (503, 400) if none is there."""

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
    """Return the error for a request for which no instance was found: status 400 if it is too long for every instance,
    else 503.
    """
    if no_capacity.reason == "never_fits":
        return BadRequestError(no_capacity.message, code="context_length_exceeded")
    return UnavailableError(no_capacity.message, retry_after_s=1.0)


def failure_error(failed: Failed) -> ApiError:
    """Return the error for the client of a request that an instance gave up (`failed` has the reason) and that is not
    replayed any more.
    """
    match failed.code:
        case "overloaded":
            return RateLimitError("the instances are overloaded: retry later", retry_after_s=1.0)
        case "timeout":
            return DeadlineError(failed.message)
        case "internal":
            return InternalError("an instance failed with an internal error; its log has the details")
        case _:
            return UnavailableError(
                f"the request was not completed, replays are used up: {failed.message}", code=failed.code
            )


class PlacementRetry:
    """Keeps the sequences of one request for which no instance is free, and tries to place them again.

    Whenever the cluster changes, it calls `place_again` with each group of sequences and the number of replays that the
    group has had. If groups still wait `wait_s` seconds after the first one was added, it calls `give_up` with the
    reason why the first one could not be placed.
    """

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

    def add(self, group: list[TokenSequence], num_replays: int, no_capacity: NoCapacity) -> None:
        """Keep a group of sequences until it is placed or the waiting time ends.

        `num_replays` is the number of replays that the group has had. `no_capacity` is the reason why it cannot be
        placed now.
        """
        self._groups.append((group, num_replays))
        if self._remove_listener is None:
            self._remove_listener = self._cluster.add_listener(self._retry)
            self._timer = asyncio.get_running_loop().call_later(self._wait_s, self._on_timeout, no_capacity)

    def end(self) -> None:
        """Stop waiting, and forget all groups of sequences."""
        self._groups.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._remove_listener is not None:
            self._remove_listener()
            self._remove_listener = None

    def _retry(self) -> None:
        # `place_again` adds a group that still cannot be placed to the new list.
        groups, self._groups = self._groups, []
        for group, num_replays in groups:
            self._place_again(group, num_replays)

    def _on_timeout(self, no_capacity: NoCapacity) -> None:
        if self._groups:
            self._give_up(no_capacity)
        else:
            self.end()

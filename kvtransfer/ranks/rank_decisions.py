"""Decides how transfers of several ranks end, and with which instances they are tried. This module is pure: no I/O."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.kvtransfer.errors import RemoteTransferError
from baton_serve.kvtransfer.session.steps import ReleaseReason

MAX_RETRY_S = 3600.0
"""Longest time in seconds for which nothing is tried after failures."""
MAX_SOURCES = 1024
"""Number of sources whose failures are remembered."""

Source = tuple[InstanceId, Generation]
"""The instance from which blocks are fetched, and its generation."""

SEVERITY: tuple[ReleaseReason, ...] = ("received", "cancelled", "closed", "expired", "lost", "failed")
"""The outcomes of a rank's part of a ticket; the last one says most about the cause."""


class RankAction(StrEnum):
    """The next action of a ticket's producer."""

    WAIT = "wait"
    """Wait for the next outcome."""
    WAIT_FOR_FETCH = "wait for a fetch"
    """Wait a limited time for a fetch of whole blocks, which the consumer starts after a failure."""
    END_RANKS = "end the ranks"
    """Stop serving the parts: the whole blocks' ticket has ended."""
    END_WHOLE = "end the whole"
    """Stop serving whole blocks: nobody will fetch them."""
    END = "end"
    """Free the blocks: no copy reads them any more."""


@dataclass(frozen=True, slots=True)
class RankVerdict:
    """The next action and, with `RankAction.END`, the reason for which the blocks may be freed."""

    action: RankAction
    reason: ReleaseReason = "received"


def next_action(
    ranks: Sequence[ReleaseReason | None], whole: ReleaseReason | None, *, is_demoted: bool, has_waited: bool
) -> RankVerdict:
    """Decide what the producer of a ticket does, of which each rank sends its part.

    `ranks` are the outcomes of the parts and `whole` is that of the whole blocks, None while they are served. With
    `is_demoted` the consumer has fetched whole blocks. `has_waited` says that the time of `WAIT_FOR_FETCH` is over.
    """
    ended = [reason for reason in ranks if reason is not None]
    if len(ended) < len(ranks):
        return RankVerdict(RankAction.WAIT if whole is None else RankAction.END_RANKS)
    worst = max(ended, key=SEVERITY.index)
    if whole is not None:
        # This node has cancelled the whole blocks after the ranks had ended, unless the consumer fetches them.
        is_own = whole == "cancelled" and not is_demoted
        return RankVerdict(RankAction.END, worst if is_own or worst == "received" else whole)
    if is_demoted:
        return RankVerdict(RankAction.WAIT)
    # Only a consumer that has reported a failure goes on with whole blocks. One that is lost would have done so
    # before its lease ended.
    if worst == "failed" and not has_waited:
        return RankVerdict(RankAction.WAIT_FOR_FETCH)
    return RankVerdict(RankAction.END_WHOLE)


def may_fetch_whole(error: Exception, *, remaining_s: float) -> bool:
    """Return whether a fetch whose part failed with `error` continues with whole blocks. `remaining_s` is what is left
    of the ticket's time, in seconds.
    """
    return isinstance(error, RemoteTransferError) and remaining_s > 0


class RankRoute(NamedTuple):
    """The state of the way from one source. It is tried when `until`, a time in seconds, is over."""

    is_open: bool = False
    is_trying: bool = False
    failures: int = 0
    until: float = 0.0


class RankRoutes:
    """Remembers for each source, an instance and its generation, whether its ranks have been reached by these ones.

    Fetches by ranks use only ways that were tried before, so that no request waits for one that does not work. After a
    failure nothing is tried for `retry_s` seconds, and twice as long after each further one.
    """

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self._routes: OrderedDict[Source, RankRoute] = OrderedDict()

    def is_open(self, source: Source) -> bool:
        """Return whether blocks are fetched from `source` by ranks."""
        return self._routes.get(source, RankRoute()).is_open

    def open_sources(self) -> set[InstanceId]:
        """Return the instances from which blocks are fetched by ranks."""
        return {source[0] for source, route in self._routes.items() if route.is_open}

    def begins(self, source: Source, now: float) -> bool:
        """Return whether the way from `source` shall be tried at the time `now`; if so, record that it is."""
        route = self._routes.get(source, RankRoute())
        if route.is_open or route.is_trying or now < route.until:
            return False
        self._set(source, route._replace(is_trying=True))
        return True

    def worked(self, source: Source) -> None:
        """Record that all ranks of `source` were reached."""
        self._set(source, RankRoute(is_open=True, failures=self._routes.get(source, RankRoute()).failures))

    def carried(self, source: Source) -> None:
        """Record that a fetch by ranks has succeeded. A later failure then counts as the first one."""
        self._set(source, RankRoute(is_open=True))

    def failed(self, source: Source, now: float) -> None:
        """Record that a rank of `source` was not reached, or did not send its part, at the time `now`."""
        route = self._routes.get(source, RankRoute())
        # Several fetches may have used the way when it failed.
        if route.is_open or route.is_trying:
            wait_s = min(MAX_RETRY_S, self._retry_s * 2.0 ** min(route.failures, 16))
            self._set(source, RankRoute(failures=route.failures + 1, until=now + wait_s))

    def _set(self, source: Source, route: RankRoute) -> None:
        self._routes[source] = route
        self._routes.move_to_end(source)
        if len(self._routes) > MAX_SOURCES:
            self._routes.popitem(last=False)

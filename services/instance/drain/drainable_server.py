"""Decides how the servers of an instance refuse new requests while they drain or pause, and end running ones."""

import asyncio
import logging
from abc import ABC, abstractmethod

from baton_serve.contracts.identity import RequestId
from baton_serve.contracts.messages import ErrorCode, Failed, LoadReport
from baton_serve.services.instance.interfaces import RouterPort

logger = logging.getLogger(__name__)


class DrainableServer(ABC):
    """Base class of the servers of an instance (`RequestServer`, `PoolingServer`, `SleepingServer`): how they refuse
    new requests and end running ones.

    A subclass clears `_idle` with each new request and sets it when no request is left.
    """

    def __init__(self, router: RouterPort) -> None:
        self._router = router
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False
        self.pause_reason = ""
        """Text for the routers why this instance accepts no requests for a while; empty if it accepts them."""

    @property
    @abstractmethod
    def num_requests(self) -> int: ...

    @abstractmethod
    def _end_all(self, code: ErrorCode, reason: str) -> None:
        """End all running requests and send `Failed` with `code` and `reason` to their routers."""

    @abstractmethod
    def _load_report(self) -> LoadReport: ...

    def send_load_reports(self) -> None:
        """Send a `LoadReport` to every connected router now, before its next heartbeat asks for one."""
        for router in self._router.routers():
            self._router.send(router, self._load_report())

    @property
    def refuses_new(self) -> bool:
        """Return whether this instance refuses new requests now, because of a drain or a pause."""
        return self.is_draining or bool(self.pause_reason)

    def pause(self, reason: str) -> None:
        """Refuse new requests until `resume`; their routers get `reason`. Report the pause to all connected routers."""
        self.pause_reason = reason
        self.send_load_reports()

    def resume(self) -> None:
        """Accept requests again after `pause`, and report that to all connected routers."""
        self.pause_reason = ""
        self.send_load_reports()

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no request runs on this instance, but at most `timeout_s` seconds. Return whether none runs."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def fail_all(self, reason: str) -> None:
        """End all requests with an error that contains `reason`, because the engine has stopped, and
        refuse new ones.
        """
        self.is_draining = True
        self._end_all("internal", reason)

    def refuse_new(self) -> None:
        """Refuse new requests from now on and report that to all connected routers."""
        self.is_draining = True
        self.send_load_reports()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and let the running ones finish; after `timeout_s` seconds end the rest, which routers
        replay on other instances.

        Return when all requests have ended and their resources are free.
        """
        if not self.is_draining:
            self.refuse_new()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            logger.warning(
                "%d requests did not finish within %g s (--drain-timeout-s), ending them", self.num_requests, timeout_s
            )
            # The router replays a request that failed with "draining" on another instance.
            self._end_all("draining", "the instance is shutting down")
            await self._idle.wait()

    def _refused(self, request_id: RequestId) -> Failed | None:
        """Return the message that refuses the new request with this id during a drain or a pause, or None if it is
        accepted.
        """
        if not self.refuses_new:
            return None
        reason = self.pause_reason or "the instance is shutting down"
        return Failed(request_id=request_id, code="draining", message=reason)

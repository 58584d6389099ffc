"""How what serves routers leaves: it takes nothing new, lets what runs end, then ends the rest."""

import asyncio
import logging
from abc import ABC, abstractmethod

from baton_serve.contracts.identity import RequestId
from baton_serve.contracts.messages import ErrorCode, Failed, LoadReport
from baton_serve.services.instance.ports import RouterPort

logger = logging.getLogger(__name__)


class DrainableServer(ABC):
    """`_idle` is set by the one who serves whenever no request is left, and cleared with each new one."""

    def __init__(self, router: RouterPort) -> None:
        self._router = router
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False

    @property
    @abstractmethod
    def num_requests(self) -> int: ...

    @abstractmethod
    def _end_all(self, code: ErrorCode, reason: str) -> None:
        """Ends all that runs; its routers hear why."""

    @abstractmethod
    def _load_report(self) -> LoadReport: ...

    def send_load_reports(self) -> None:
        """Every router hears at once what has changed."""
        for router in self._router.routers():
            self._router.send(router, self._load_report())

    def fail_all(self, reason: str) -> None:
        """The engine is gone: all end, and nothing new is taken."""
        self.is_draining = True
        self._end_all("internal", reason)

    def refuse_new(self) -> None:
        """From now on; every router is told at once."""
        self.is_draining = True
        self.send_load_reports()

    async def drain(self, timeout_s: float) -> None:
        """Takes nothing new, lets what runs end, then ends the rest. Returns when everything is free."""
        if not self.is_draining:
            self.refuse_new()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("%d requests did not end within %g s", self.num_requests, timeout_s)
            self._end_all("draining", "the instance stops")
            await self._idle.wait()

    def _refused(self, request_id: RequestId) -> Failed | None:
        """What the router of a new request hears, if none is taken."""
        if not self.is_draining:
            return None
        return Failed(request_id=request_id, code="draining", message="the instance stops")

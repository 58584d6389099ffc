"""Gives each request of an instance a span in the router's trace, its id in every log line, and a line at its end."""

import asyncio
import logging
import time

from baton_serve.services.common.logs import request_logs
from baton_serve.services.common.tracing import Tracing
from baton_serve.services.instance.attempt_table import AttemptEntry
from baton_serve.services.instance.interfaces import EngineStats
from baton_serve.services.instance.request_server import RoleHandler, RoleMessage

logger = logging.getLogger(__name__)


class TracedRole:
    """Wraps the `RoleHandler` of an instance and adds a trace span and log lines to each request. It does not change
    how requests are served.
    """

    def __init__(self, role: RoleHandler, tracing: Tracing) -> None:
        self._role = role
        self._tracing = tracing

    def can_serve(self, message: RoleMessage) -> bool:
        return self._role.can_serve(message)

    def refused(self, message: RoleMessage, reason: str) -> None:
        self._role.refused(message, reason)

    async def serve(self, request: AttemptEntry, message: RoleMessage) -> None:
        kind = type(message).__name__.lower()
        began_at = time.monotonic()
        # A task has its own context: the id is added to the log lines of this request only.
        with request_logs(request.request_id):
            request.span = self._tracing.span(kind, message.work.trace_headers, at=began_at)
            request.span.set({"gen_ai.request.id": request.request_id})
            outcome = "failed"
            try:
                with request.span:
                    await self._role.serve(request, message)
                outcome = "done"
            except asyncio.CancelledError:
                outcome = "cancelled"
                raise
            finally:
                seconds = round(time.monotonic() - began_at, 6)
                logger.debug("request ended", extra={"kind": kind, "outcome": outcome, "seconds": seconds})

    def on_stats(self, stats: EngineStats) -> None:
        self._role.on_stats(stats)

    def num_queued(self) -> int:
        return self._role.num_queued()

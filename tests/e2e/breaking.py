"""Instances that break each request once: prefill before a block of it has left, decode in the middle of the answer."""

import asyncio
from collections.abc import Callable

from baton_serve.contracts.instance import Role
from baton_serve.contracts.messages import ErrorCode, Prefill
from baton_serve.engine.core.outputs import CompletedBlocks, SequenceOutput
from baton_serve.services.instance.attempt_table import AttemptEntry, RequestObserver
from baton_serve.services.instance.errors import RequestFailed
from baton_serve.services.instance.interfaces import EngineStats
from baton_serve.services.instance.request_server import RoleHandler, RoleMessage

ATTEMPTS: dict[Role, int] = {"prefill": 0, "decode": 1}
"""Which attempt at a request breaks where. The first at prefill, so that the second reaches decode."""
POSITION = 2
"""Of the last token that decode writes before it breaks: the first two come from both instances."""


class Breaking:
    """`RoleHandler` around another one."""

    def __init__(self, role: Role, handler: RoleHandler) -> None:
        self._role: Role = role
        self._handler = handler

    def can_serve(self, message: RoleMessage) -> bool:
        return self._handler.can_serve(message)

    def refused(self, message: RoleMessage, reason: str) -> None:
        self._handler.refused(message, reason)

    async def serve(self, request: AttemptEntry, message: RoleMessage) -> None:
        attempt = int(message.work.request_id.rpartition("~")[2])
        if attempt != ATTEMPTS.get(self._role):
            await self._handler.serve(request, message)
            return
        if isinstance(message, Prefill) and message.ticket is None:
            raise RequestFailed("internal", "broken on purpose")  # its token would be there before a block is
        serving = asyncio.ensure_future(self._handler.serve(request, message))
        await asyncio.sleep(0)  # by now it has registered for progress events
        broken = asyncio.Event()
        assert request.progress is not None
        request.progress = _Watched(request.progress, broken.set, at_blocks=self._role == "prefill")
        breaking = asyncio.ensure_future(broken.wait())
        try:
            await asyncio.wait([serving, breaking], return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_over = serving.done()
            breaking.cancel()
            serving.cancel()
            await asyncio.wait([serving])
        if not is_over:
            raise RequestFailed("internal", "broken on purpose")
        serving.result()

    def on_stats(self, stats: EngineStats) -> None:
        self._handler.on_stats(stats)

    def num_queued(self) -> int:
        return self._handler.num_queued()


class _Watched:
    """`RequestObserver` that says when it is time to break, and nothing of what comes with that."""

    def __init__(self, inner: RequestObserver, stop: Callable[[], None], *, at_blocks: bool) -> None:
        self._inner = inner
        self._stop = stop
        self._at_blocks = at_blocks

    def completed(self, blocks: CompletedBlocks) -> None:
        if self._at_blocks:
            self._stop()
        else:
            self._inner.completed(blocks)

    def completed_layer_groups(self, blocks: CompletedBlocks, parts: range) -> None:
        if self._at_blocks:
            self._stop()
        else:
            self._inner.completed_layer_groups(blocks, parts)

    def token(self, output: SequenceOutput) -> None:
        if not self._at_blocks and output.position >= POSITION:
            self._stop()
        self._inner.token(output)

    def held(self, at: float) -> None:
        self._inner.held(at)

    def ended(self) -> None:
        self._inner.ended()

    def failed(self, code: ErrorCode, message: str) -> None:
        self._inner.failed(code, message)

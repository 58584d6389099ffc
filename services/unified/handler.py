"""Serves a request on a unified instance: computes the prompt and generates the answer."""

from baton_serve.contracts.messages import Generate
from baton_serve.engine.model.vision.placeholders import ImageReader
from baton_serve.services.instance.attempt_table import AttemptEntry
from baton_serve.services.instance.engine_thread import EngineCalls
from baton_serve.services.instance.kv_sharing.pulling import PullPort
from baton_serve.services.instance.local_generation import generate
from baton_serve.services.instance.ports import EngineStats
from baton_serve.services.instance.request_server import RoleMessage


class UnifiedHandler:
    """Implements `services.instance.request_server.RoleHandler` for unified instances. Event loop only."""

    def __init__(self, engine: EngineCalls, puller: PullPort, reader: ImageReader | None = None) -> None:
        self._engine = engine
        self._puller = puller
        self._reader = reader

    def can_serve(self, message: RoleMessage) -> bool:
        return isinstance(message, Generate)

    def refused(self, message: RoleMessage, reason: str) -> None:
        """Do nothing: no peer waits for a unified instance."""

    async def serve(self, request: AttemptEntry, message: RoleMessage) -> None:
        assert isinstance(message, Generate)
        await generate(self._engine, request, self._puller, message, self._reader)

    def on_stats(self, stats: EngineStats) -> None:
        """Do nothing: no request waits outside the engine."""

    def num_queued(self) -> int:
        return 0

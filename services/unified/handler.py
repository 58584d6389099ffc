"""What a unified instance does with a request: all of it."""

from contracts.messages import Generate
from engine.vision.given import ImageReader
from services.instance.engine_thread import EngineCalls
from services.instance.generation import generate
from services.instance.ports import EngineStats
from services.instance.pulling import PullPort
from services.instance.requests import Request
from services.instance.serving import Assignment


class UnifiedHandler:
    """`services.instance.serving.RoleHandler`."""

    def __init__(self, engine: EngineCalls, puller: PullPort, reader: ImageReader | None = None) -> None:
        self._engine = engine
        self._puller = puller
        self._reader = reader

    def can_serve(self, message: Assignment) -> bool:
        return isinstance(message, Generate)

    def refused(self, message: Assignment, reason: str) -> None:
        """Nobody waits for it."""

    async def serve(self, request: Request, message: Assignment) -> None:
        assert isinstance(message, Generate)
        await generate(self._engine, request, self._puller, message, self._reader)

    def on_stats(self, stats: EngineStats) -> None:
        """Nothing waits outside the engine."""

    def num_queued(self) -> int:
        return 0

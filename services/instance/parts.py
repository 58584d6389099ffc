"""What a process of an instance is put together from, as its role and its engine see it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from contracts.instance import Load
from contracts.messages import ToInstance
from engine import Engine, EngineStats
from engine.vision.given import ImageReader
from kvtransfer import TransferNode
from services.common.rpc import InstanceServer, RouterId
from services.instance.engine_thread import EngineThread, Turn
from services.instance.metrics import TransferMetrics
from services.instance.pulling import Puller
from services.instance.serving import RoleHandler


@dataclass(frozen=True, slots=True)
class Parts:
    """What a role's handler is made of."""

    engine: EngineThread[Engine]
    transfer: TransferNode
    router: InstanceServer
    counter: TransferMetrics
    puller: Puller
    image_reader: ImageReader | None
    """None: prompts with images are not read here."""


MakeHandler = Callable[[Parts], RoleHandler]


class Service(Protocol):
    """What this process does with its engine: `Serving`, or `PoolingServing`."""

    stats: EngineStats
    is_draining: bool

    @property
    def num_requests(self) -> int: ...
    def load(self) -> Load: ...
    def on_message(self, router: RouterId, message: ToInstance) -> None: ...
    def on_router_lost(self, router: RouterId) -> None: ...
    def on_turn(self, turn: Turn) -> None: ...
    def on_stats(self, stats: EngineStats) -> None: ...
    def fail_all(self, reason: str) -> None: ...
    def refuse_new(self) -> None: ...
    def tell_routers(self) -> None: ...
    async def drain(self, timeout_s: float) -> None: ...

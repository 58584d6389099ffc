"""What a process of an instance is put together from, as its role and its engine see it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton_serve.contracts.instance import Load
from baton_serve.contracts.messages import ToInstance
from baton_serve.engine import Engine, EngineStats
from baton_serve.engine.model.vision.placeholders import ImageReader
from baton_serve.kvtransfer import TransferNode
from baton_serve.services.common.zmq.rpc import InstanceServer, RouterId
from baton_serve.services.instance.engine_thread import EngineThread, TimedStepResult
from baton_serve.services.instance.kv_sharing.pulling import Puller
from baton_serve.services.instance.metrics import TransferMetrics
from baton_serve.services.instance.request_server import RoleHandler


@dataclass(frozen=True, slots=True)
class RoleDependencies:
    """What a role's handler is made of."""

    engine: EngineThread[Engine]
    transfer: TransferNode
    router: InstanceServer
    counter: TransferMetrics
    puller: Puller
    image_reader: ImageReader | None
    """None: prompts with images are not read here."""


MakeHandler = Callable[[RoleDependencies], RoleHandler]


class InstanceService(Protocol):
    """What this process does with its engine: `Serving`, or `PoolingServing`."""

    stats: EngineStats
    is_draining: bool

    @property
    def num_requests(self) -> int: ...
    def load(self) -> Load: ...
    def on_message(self, router: RouterId, message: ToInstance) -> None: ...
    def on_router_lost(self, router: RouterId) -> None: ...
    def on_step_result(self, turn: TimedStepResult) -> None: ...
    def on_stats(self, stats: EngineStats) -> None: ...
    def fail_all(self, reason: str) -> None: ...
    def refuse_new(self) -> None: ...
    def send_load_reports(self) -> None: ...
    async def drain(self, timeout_s: float) -> None: ...

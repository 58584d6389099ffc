"""Defines what a role's request handler gets, and the interface of an instance's server."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton_serve.contracts.instance import Load
from baton_serve.contracts.messages import ToInstance
from baton_serve.engine import Engine, EngineStats
from baton_serve.kvtransfer import RankedTransferNode
from baton_serve.services.common.rpc.instance_link import InstanceServer, RouterId
from baton_serve.services.instance.engine_thread import EngineThread, TimedStepResult
from baton_serve.services.instance.kv_sharing.prompt_image_source import PromptImageSource
from baton_serve.services.instance.kv_sharing.pulling import Puller
from baton_serve.services.instance.metrics import TransferMetrics
from baton_serve.services.instance.request_server import RoleHandler


@dataclass(frozen=True, slots=True)
class RoleDependencies:
    """The parts of an instance process that the request handler of its role uses; `ModelParts` creates it once the
    model is loaded.
    """

    engine: EngineThread[Engine]
    transfer: RankedTransferNode
    router: InstanceServer
    counter: TransferMetrics
    puller: Puller
    images: PromptImageSource
    """Gets the images of prompts, as embeddings or as pixels."""


MakeHandler = Callable[[RoleDependencies], RoleHandler]


class InstanceService(Protocol):
    """The interface of an instance's server, which answers its routers: `RequestServer`, `PoolingServer` for models
    that compute vectors, or `SleepingServer` without a model.

    All methods are called on the event loop.
    """

    stats: EngineStats
    is_draining: bool
    pause_reason: str

    @property
    def refuses_new(self) -> bool: ...
    @property
    def num_requests(self) -> int: ...
    def load(self) -> Load: ...
    def on_message(self, router: RouterId, message: ToInstance) -> None: ...
    def on_router_lost(self, router: RouterId) -> None: ...
    def on_step_result(self, step: TimedStepResult) -> None: ...
    def on_stats(self, stats: EngineStats) -> None: ...
    def fail_all(self, reason: str) -> None: ...
    def refuse_new(self) -> None: ...
    def send_load_reports(self) -> None: ...
    def pause(self, reason: str) -> None: ...
    def resume(self) -> None: ...
    async def idle(self, timeout_s: float) -> bool: ...
    async def drain(self, timeout_s: float) -> None: ...

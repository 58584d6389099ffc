"""Replaces the model of a running instance, or none while it sleeps, and gives each a new generation.

Each change ends with a new generation: routers and peers then drop what they know of the old model, such as the blocks
that it has cached and the connections for KV transfer, as after a restart of the process.
"""

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
import torch

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import InstanceId, new_generation
from baton_serve.contracts.instance import InstanceRecord, KernelVerdict, LinkStatus, RankTransfers
from baton_serve.contracts.messages import ToInstance, WeightsSource
from baton_serve.engine import Engine
from baton_serve.engine.device import release_unused
from baton_serve.engine.errors import ConfigError, ModelError
from baton_serve.engine.loading.weight_replacement import check_replacement
from baton_serve.engine.pooling.encode_engine import ImageEncoder
from baton_serve.engine.pooling.engine import PoolingEngine
from baton_serve.services.common.rpc.instance_link import RouterId
from baton_serve.services.instance.addresses import advertised, shared_memory_host
from baton_serve.services.instance.engine_thread import EngineThread
from baton_serve.services.instance.errors import InstanceError
from baton_serve.services.instance.model_parts import AnyEngineThread, ModelConnections, ModelParts, ProcessParts
from baton_serve.services.instance.request_server import Identity
from baton_serve.services.instance.role_interface import InstanceService
from baton_serve.services.instance.settings import InstanceSettings, model_names
from baton_serve.services.instance.sleeping_server import SleepingServer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses of an instance process that stay the same when its model is replaced, as the
    registry shows them.
    """

    rpc: str
    http: str


class InstanceModel:
    """Owns the loaded model of an instance or, while it sleeps or loads, the server that refuses requests in its place.
    Implements `ModelHost`. Use it only on the event loop.

    `serving` is the server that the routers see. After `load` it is still the one that refuses requests until
    `publish`, so that the old generation does not answer for the new model.
    """

    serving: InstanceService
    device: torch.device
    _last_record: InstanceRecord

    def __init__(self, process: ProcessParts, instance: InstanceId, on_fatal: Callable[[Exception], None]) -> None:
        """Load nothing yet. `on_fatal` is called with an error that must end the process. Raises the errors of
        `ModelParts.__init__`.
        """
        self._process = process
        self._on_fatal = on_fatal
        self.weights = WeightsSource(model=process.settings.model, load_format=process.settings.load_format)
        self.identity = Identity(instance, new_generation())
        self._model: ModelParts | None = ModelParts(process, self.identity, self.weights)
        self._thread: AnyEngineThread | None = self._model.thread
        self.is_sleeping = False
        self.on_published: Callable[[], Awaitable[None]] = _do_nothing
        """Called after each change of the model, when `serving` and `record` show it. The owner sets it."""
        self.on_serving_changed: Callable[[], None] = lambda: None
        """Called whenever `serving` is another server. The owner sets it, and drops the old one."""

    async def start(self, connections: ModelConnections) -> None:
        """Load the model that the settings name. Raises the errors of `ModelParts.start`; the caller then calls
        `close`.
        """
        self._connections = connections
        assert self._model is not None
        await self._model.start(connections)
        self.serving = self._model.serving
        self.device = self._model.device()

    async def close(self) -> None:
        """Stop all parts of the loaded model and free its memory. Do nothing if none is loaded."""
        model, self._model = self._model, None
        if model is not None:
            await model.close()

    @property
    def is_loading(self) -> bool:
        """Return whether the engine thread is still alive, asked after the shutdown: it is loading a model then, and
        cannot be stopped.
        """
        return self._thread is not None and self._thread.is_alive

    @property
    def model(self) -> ModelParts | None:
        """Return the parts of the loaded model, which requests use now; None while the instance sleeps or loads."""
        return self._model if self._model is not None and self._model.identity == self.identity else None

    def engine_thread(self) -> EngineThread[Engine]:
        """Return the engine thread of the loaded model. Raises `ConfigError` if no model is loaded, or if it does not
        generate text.
        """
        model = self.model
        if model is None:
            raise ConfigError("the model is not loaded: the instance sleeps or loads new weights")
        if not isinstance(model.engine, Engine):
            raise ConfigError("this instance computes vectors: its engine has no prefix cache and records no profiles")
        return cast("EngineThread[Engine]", model.thread)

    def on_message(self, router: RouterId, message: ToInstance) -> None:
        """Pass a router's message to the parts of the loaded model or, without a model, to the server that refuses
        requests.
        """
        if (model := self.model) is not None:
            model.on_message(router, message)
        else:
            self.serving.on_message(router, message)

    def record(self, addresses: Addresses) -> InstanceRecord:
        """Return the registry record of this instance, with its present load. `addresses` are those of the process.
        Without a model it is the last one with a model, changed so that routers place nothing here.
        """
        if (model := self.model) is None:
            # Routers of versions before `sleeping` place nothing on an instance that drains.
            return msgspec.structs.replace(
                self._last_record,
                generation=self.identity.generation,
                load=self.serving.load(),
                draining=True,
                sleeping=self.is_sleeping,
                adapters=[],
            )
        settings, engine = self._process.settings, model.engine
        name, *aliases = model_names(settings)
        self._last_record = InstanceRecord(
            instance=self.identity.instance,
            generation=self.identity.generation,
            role=self._process.role,
            model=name,
            model_aliases=aliases,
            layout=engine.layout,
            max_model_len=engine.max_model_len,
            rpc_address=addresses.rpc,
            transfer_address=advertised(settings, model.transfer.address) if model.transfer is not None else "",
            events_address=advertised(settings, model.events.address),
            http_address=addresses.http,
            host=shared_memory_host(),
            load=self.serving.load(),
            draining=self.serving.is_draining,
            adapters=model.adapters(),
            reads_images=isinstance(engine, Engine) and engine.image_reader is not None,
            finds_unsent_images=isinstance(engine, Engine),
            embedding_layout=_embedding_layout(engine),
            can_generate=isinstance(engine, Engine),
            wrong_kernels=list(dict.fromkeys(verdict.operation for verdict in model.wrong_kernels())),
            rank_transfers=_advertised_ranks(settings, model.rank_transfers),
            pooling=engine.profile if isinstance(engine, PoolingEngine) else None,
        )
        return self._last_record

    def links(self) -> Sequence[LinkStatus]:
        """Return the state of the connections by which KV blocks arrive from other instances; none without a model."""
        return self.model.links() if self.model is not None else []

    def wrong_kernels(self) -> list[KernelVerdict]:
        """Return the verdicts of kernels and captured graphs that computed wrong results on this device at the start
        and are not used; none without a model.
        """
        return self.model.wrong_kernels() if self.model is not None else []

    def kill_ranks(self) -> None:
        """Kill the processes of the engine's other ranks (tensor or pipeline parallelism), if there are any. Any thread
        may call it.
        """
        if self._model is not None:
            self._model.kill_ranks()

    async def migrate_out(self) -> None:
        """Offer the most used KV blocks to another instance, in a drain. Do nothing without a loaded model."""
        if self.model is not None:
            await self.model.migrate_out()

    def deliver(self, callback: Callable[[None], None]) -> None:
        """Call `callback(None)` on the event loop. Any thread may call it. Do nothing without an engine thread."""
        if self._thread is not None:
            self._thread.deliver(callback, None)

    @property
    def num_requests(self) -> int:
        return self.serving.num_requests

    @property
    def is_draining(self) -> bool:
        return self.serving.is_draining

    def pause(self, reason: str) -> None:
        """Refuse new requests until `resume`; their routers get `reason`."""
        self.serving.pause(reason)

    def resume(self) -> None:
        """Accept new requests again after `pause`."""
        self.serving.resume()

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no request runs on this instance; return False if one still runs after `timeout_s` seconds."""
        return await self.serving.idle(timeout_s)

    async def check(self, loaded: WeightsSource, weights: WeightsSource) -> None:
        """Check that the model files `weights` can replace those of `loaded`: the model must have the same shape.
        Raises `EngineError` if not.
        """
        if not weights.version:
            raise ConfigError("new weights need a version, or KV of the old ones could be used with them")
        await asyncio.to_thread(check_replacement, loaded.model, weights.model, weights.load_format)

    async def unload(self, reason: str) -> None:
        """Close the loaded model and free its memory on the device and in this process. No request may run.

        Other instances that fetch blocks from it get an error and compute these blocks. `serving` refuses requests with
        `reason` from now on.
        """
        model = self.model
        assert model is not None and not self.serving.num_requests
        server = SleepingServer(self.identity, stats=self.serving.stats, router=self._connections.rpc, reason=reason)
        self._model, self.serving = None, server
        self.on_serving_changed()
        await model.close()
        # The thread refers to its engine. One that is stuck is kept for `is_loading`.
        self._thread = model.thread if model.thread.is_alive else None
        del model
        # At the end of the start all objects were frozen, among them those of the model, which refer to each other.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        release_unused(self.device)

    async def load(self, weights: WeightsSource) -> None:
        """Load the model files `weights`, of the same shape as before, and start their parts under a new generation.
        Routers see them only after `publish`.

        After an error nothing is loaded. Raises `EngineError`, `InstanceError`, `TransferError`, `OSError` or
        `zmq.ZMQError`.
        """
        model = ModelParts(self._process, Identity(self.identity.instance, new_generation()), weights)
        self._model, self._thread = model, model.thread
        try:
            await model.start(self._connections)
            self._check_shape(model, weights)
            # As at the end of the start of the process.
            gc.collect()
            gc.freeze()
        except BaseException:
            # Half of the parts may run, and hold the memory that the next attempt needs.
            await self.close()
            raise

    async def publish(self, *, is_sleeping: bool, pause_reason: str) -> None:
        """Show the routers what was loaded by `load`, under its generation; without a loaded model, show a new
        generation that refuses requests.

        The loaded model refuses requests if `pause_reason` is not empty. `is_sleeping` is the state that the instance
        reports.
        """
        self.is_sleeping = is_sleeping
        if self._model is not None:
            self.identity, self.serving = self._model.identity, self._model.serving
            self.serving.pause_reason = pause_reason
            self.on_serving_changed()
        else:
            self.identity = Identity(self.identity.instance, new_generation())
            assert isinstance(self.serving, SleepingServer)
            self.serving.identity = self.identity
        await self.on_published()

    def give_up(self, reason: str) -> None:
        """End the process with an error that contains `reason`, because the instance has no model any more."""
        self._on_fatal(InstanceError(reason))

    def _check_shape(self, model: ModelParts, weights: WeightsSource) -> None:
        """Raise `ModelError` if the KV blocks of the new `model` have another layout than those of the model before, or
        if its length limit differs.
        """
        before, after = self._last_record, model.engine
        if msgspec.structs.replace(after.layout, fingerprint=before.layout.fingerprint) != before.layout:
            raise ModelError(f"{weights.model} needs other KV blocks than the loaded model: {after.layout}")
        if after.max_model_len != before.max_model_len:
            raise ModelError(
                f"{weights.model} allows {after.max_model_len} tokens, and the loaded model {before.max_model_len}: set"
                " --max-model-len of the workers"
            )


def _advertised_ranks(settings: InstanceSettings, ranks: RankTransfers | None) -> RankTransfers | None:
    """Return the transfers of ranks with the addresses under which other processes reach them."""
    if ranks is None:
        return None
    return RankTransfers(ranks.division, [advertised(settings, address) for address in ranks.addresses])


def _embedding_layout(engine: Engine | PoolingEngine | ImageEncoder) -> KVLayout | None:
    """Return the layout of the embeddings that an engine can use for prompts, or None."""
    reader = engine.image_reader if isinstance(engine, Engine) else None
    return None if reader is None else reader.embedding_layout


async def _do_nothing() -> None:
    """Do nothing: the default of `on_published` until the owner sets it."""

"""Assembles what an instance has only while a model is loaded: engine, KV transfer and request server.

A process that sleeps has none of them. A process whose weights are replaced closes them and starts new ones, under a
new generation: for its routers and peers it looks like a process that has restarted, so that nothing of the old KV
cache can be used.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
import torch

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.instance import AdapterRecord, KernelVerdict, LinkStatus, RankTransfers, Role
from baton_serve.contracts.messages import (
    AdapterChanged,
    LoadAdapter,
    MigrateIn,
    MigrationTickets,
    ToInstance,
    UnloadAdapter,
    WeightsSource,
)
from baton_serve.engine import Engine
from baton_serve.engine.pooling.encode_engine import ImageEncoder
from baton_serve.engine.pooling.engine import PoolingEngine
from baton_serve.kvtransfer import (
    BlockMemory,
    NodePorts,
    PeerAccess,
    RankedTransferNode,
    TransferNode,
    TransferSettings,
)
from baton_serve.services.common.cluster_key import ClusterKey
from baton_serve.services.common.process_lifecycle import Lifecycle
from baton_serve.services.common.rpc.instance_link import InstanceServer, RouterId
from baton_serve.services.common.settings.configuration import environment
from baton_serve.services.common.tracing import Tracing
from baton_serve.services.common.zmq.block_events import EventPublisher
from baton_serve.services.instance.adapter_loader import AdapterLoader
from baton_serve.services.instance.addresses import tcp
from baton_serve.services.instance.cpu_sharing.time_slicing import TimeSlicer
from baton_serve.services.instance.drain.migration import DrainMigration
from baton_serve.services.instance.encoding_server import EncodingServer
from baton_serve.services.instance.engine_builder import (
    build_engine,
    build_image_encoder,
    build_pooling_engine,
    model_kind,
)
from baton_serve.services.instance.engine_thread import EngineThread
from baton_serve.services.instance.errors import EngineBroken, StartFailed
from baton_serve.services.instance.kv_sharing.block_serving import KVSharing
from baton_serve.services.instance.kv_sharing.encoded_images import EmbeddingFetcher
from baton_serve.services.instance.kv_sharing.prompt_image_source import PromptImageSource
from baton_serve.services.instance.kv_sharing.pulling import Puller
from baton_serve.services.instance.metrics import EmbeddingMetrics, TransferMetrics
from baton_serve.services.instance.nodes.meeting import NodeMeeting
from baton_serve.services.instance.pooling_server import PoolingServer
from baton_serve.services.instance.rank_transfers.start_ranks import start_ranks
from baton_serve.services.instance.request_server import Identity, RequestServer
from baton_serve.services.instance.role_interface import InstanceService, MakeHandler, RoleDependencies
from baton_serve.services.instance.settings import InstanceSettings, peer_access
from baton_serve.services.instance.traced_role import TracedRole
from baton_serve.services.instance.watchdog.step_watchdog import StepWatchdog

AnyEngineThread = EngineThread[Engine] | EngineThread[PoolingEngine] | EngineThread[ImageEncoder]


@dataclass(frozen=True, slots=True)
class ProcessParts:
    """The parts of an instance process that its loaded model uses. They stay when the model is replaced."""

    settings: InstanceSettings
    role: Role
    make_handler: MakeHandler
    watchdog: StepWatchdog
    slicer: TimeSlicer
    counter: TransferMetrics
    embeddings: EmbeddingMetrics
    nodes: NodeMeeting | None = None
    """Connects the other hosts of this instance; None: there are none."""


@dataclass(frozen=True, slots=True)
class ModelConnections:
    """The connections of an instance process that its loaded model uses. They stay when the model is replaced.
    `announce` shows changed adapters to the routers, and `on_broken` is called if the engine cannot continue.
    """

    rpc: InstanceServer
    key: ClusterKey | None
    tracing: Tracing
    announce: Callable[[], Awaitable[None]]
    on_broken: Callable[[EngineBroken], None]


class ModelParts:
    """Owns the parts of an instance that exist while one model is loaded (engine, KV transfer, server), from `start`
    until `close`. Use it only on the event loop.

    `engine`, `serving`, `events` and `transfer` exist after `start`; `transfer` is None if the model computes vectors.
    """

    engine: Engine | PoolingEngine | ImageEncoder
    serving: InstanceService
    events: EventPublisher

    def __init__(self, process: ProcessParts, identity: Identity, weights: WeightsSource) -> None:
        """Load nothing yet. `identity` has the generation under which the model will serve, and `weights` its files.
        Raises `StartFailed` or `EngineError` if a flag or the role does not fit the model.
        """
        self._process = process
        self.identity = identity
        # The process keeps its own settings: its name in requests must not follow the folder of new weights.
        self._settings = msgspec.structs.replace(process.settings, model=weights.model, load_format=weights.load_format)
        self.thread = engine_thread(self._settings, process, weights.version)
        self.transfer: TransferNode | RankedTransferNode | None = None
        self.rank_transfers: RankTransfers | None = None
        self._drain_migration: DrainMigration | None = None
        self._adapter_loader: AdapterLoader | None = None
        self._parts = Lifecycle()
        """The started parts, to be stopped in reverse order."""

    async def start(self, connections: ModelConnections) -> None:
        """Load the model and start all parts. After any exception the caller must call `close`.

        Raises `EngineError` if the model cannot be loaded, and `TransferError` or `zmq.ZMQError` if a port cannot be
        bound.
        """
        engine = self.engine = await self.thread.start()
        self._parts.on_stop("engine", self.thread.stop)
        await self._start_events(connections.key)
        if isinstance(engine, Engine):
            self.serving = await self._generation(engine, connections)
        elif isinstance(engine, ImageEncoder):
            self.serving = await self._encoding(engine, connections)
        else:
            self.serving = self._pooling(engine, connections.rpc)
        serving = self.serving

        def on_broken(error: EngineBroken) -> None:
            # Routers get `Failed` for their requests before the shutdown closes the connections, so that they replay at
            # once.
            serving.fail_all(str(error))
            connections.on_broken(error)

        self.thread.attach(on_step_result=serving.on_step_result, on_stats=serving.on_stats, on_broken=on_broken)

    async def close(self) -> None:
        """Stop all parts and free the memory of the model. Each part has a time limit."""
        await self._parts.stop_all()

    def on_message(self, router: RouterId, message: ToInstance) -> None:
        """Pass a router's message to the part that handles it: drain migration, LoRA adapters, or the server."""
        match message:
            case MigrateIn() if self._drain_migration is not None:
                self._drain_migration.on_migrate_in(message, is_draining=self.serving.refuses_new)
            case MigrationTickets() if self._drain_migration is not None:
                self._drain_migration.on_migration_tickets(message)
            case LoadAdapter() | UnloadAdapter() if self._adapter_loader is not None:
                self._adapter_loader.on_message(router, message)
            case LoadAdapter() | UnloadAdapter():
                refused = "this instance computes vectors; LoRA adapters are only supported where text is generated"
                self._rpc.send(
                    router, AdapterChanged(request_id=message.request_id, refusal="invalid", message=refused)
                )
            # Engines that compute vectors have no KV blocks to fetch or to hand to others.
            case MigrateIn() | MigrationTickets():
                return
            case _:
                self.serving.on_message(router, message)

    async def migrate_out(self) -> None:
        """Offer the most used KV blocks to another instance, in a drain. Do nothing for a model that
        computes vectors.
        """
        if self._drain_migration is not None:
            await self._drain_migration.migrate_out()

    def links(self) -> Sequence[LinkStatus]:
        """Return the state of the connections by which KV blocks arrive from other instances; empty for a model that
        computes vectors.
        """
        return self.transfer.links() if self.transfer is not None else []

    def adapters(self) -> list[AdapterRecord]:
        """Return the LoRA adapters that are loaded now and that requests may name."""
        return self.engine.adapters.records() if isinstance(self.engine, Engine) else []

    def wrong_kernels(self) -> list[KernelVerdict]:
        """Return the verdicts of kernels and captured graphs that computed wrong results on this device at the start
        and are not used.
        """
        verdicts = self.engine.kernel_verdicts if isinstance(self.engine, Engine) else []
        return [verdict for verdict in verdicts if not verdict.is_right]

    def kill_ranks(self) -> None:
        """Kill the processes of the engine's other ranks (tensor or pipeline parallelism), if there are any. Any thread
        may call it.
        """
        if isinstance(self.engine, Engine | PoolingEngine):
            self.engine.kill_ranks()

    def device(self) -> torch.device:
        """Return the device on which the engine computes; with several ranks, that of the first one."""
        engine = self.engine
        return engine.kv.device if isinstance(engine, Engine) else engine.device

    async def _start_events(self, key: ClusterKey | None) -> None:
        """Open the port on which changes of the KV cache are published to routers, encrypted if there is a `key`."""
        self.events = EventPublisher(
            instance=self.identity.instance,
            generation=self.identity.generation,
            bind_address=tcp(self._settings, self._settings.events_port),
            key=key,
        )
        await self.events.start()
        self._parts.on_stop("events", self.events.close)

    async def _generation(self, engine: Engine, connections: ModelConnections) -> RequestServer:
        """Start the parts that only a model that generates text needs (KV transfer, drain migration, LoRA changes), and
        return its server.
        """
        settings, identity, rpc, parts = self._settings, self.identity, connections.rpc, self._parts
        self._rpc = rpc
        counter = self._process.counter
        node_settings = transfer_settings(
            settings, connections.key, peer_access(environment()), parts=engine.tail_parts
        )
        whole = self._node(engine.layout, engine.kv, node_settings)
        await whole.start()
        self.transfer = transfer = await self._with_ranks(whole, engine, node_settings)
        # The thread has just built this `engine`, so its type is known here.
        thread = cast("EngineThread[Engine]", self.thread)
        sharing = KVSharing(thread, transfer)
        # Registered before the transfer node, so it stops after it: closing the node ends all transfers, for which
        # `sharing.close` then waits.
        parts.on_stop("sharing", sharing.close)
        parts.on_stop("transfer", transfer.close)
        puller = Puller(thread, transfer, layout=engine.layout, counter=counter)
        self._drain_migration = DrainMigration(
            identity,
            engine=thread,
            router=rpc,
            sharing=sharing,
            puller=puller,
            timeout_s=settings.drain_handover_s,
            max_blocks=int(settings.drain_handover_gb * (1 << 30)) // engine.layout.block_bytes,
        )
        # Stops before the transfer node: fetches of a drain migration write to the KV cache and use the node.
        parts.on_stop("drain migration", self._drain_migration.close)
        images = self._image_source(engine, node_settings)
        role = self._process.make_handler(RoleDependencies(thread, transfer, rpc, counter, puller, images))
        serving = RequestServer(
            identity,
            role=TracedRole(role, connections.tracing),
            engine=thread,
            stats=engine.stats(),
            router=rpc,
            events=self.events,
            links=transfer,
        )
        serving.adapters = engine.adapters.records
        self._adapter_loader = AdapterLoader(engine.adapters, engine=thread, router=rpc, announce=connections.announce)
        parts.on_stop("adapters", self._adapter_loader.close)
        # The engine calls this from another thread: `deliver` passes it on to the event loop.
        engine.on_layer_groups(lambda tail: thread.deliver(serving.on_layer_groups, tail))
        return serving

    async def _with_ranks(self, whole: TransferNode, engine: Engine, settings: TransferSettings) -> RankedTransferNode:
        """Return the instance's transfers: those of the started node `whole`, and of each rank if ranks have memory of
        their own. The transfers own the node.
        """
        try:
            started = await start_ranks(
                engine,
                self.identity.instance,
                self.identity.generation,
                settings=settings,
                observer=self._process.counter,
                on_broken=self.thread.give_up,
            )
        except BaseException:
            await whole.close()
            raise
        transfer = RankedTransferNode(whole, started.ranks)
        if started.ranks:
            self.rank_transfers = RankTransfers(started.division, transfer.rank_addresses)
        return transfer

    def _node(self, layout: KVLayout, memory: BlockMemory, settings: TransferSettings) -> TransferNode:
        """Return a node of this instance that is not started yet."""
        return TransferNode(
            instance=self.identity.instance,
            generation=self.identity.generation,
            layout=layout,
            memory=memory,
            settings=settings,
            ports=NodePorts(observer=self._process.counter),
        )

    def _image_source(self, engine: Engine, node_settings: TransferSettings) -> PromptImageSource:
        """Return what gets the images of prompts, which may fetch embeddings from encode instances."""
        reader = engine.image_reader
        if reader is None or (layout := reader.embedding_layout) is None:
            return PromptImageSource(reader, can_await_images=engine.can_await_images)
        # Nobody fetches from this node, so its port may be any one. Embeddings arrive in host memory, whole.
        own = msgspec.structs.replace(node_settings, bind="tcp://127.0.0.1:*", advertise_host="", parts=1)
        fetcher = EmbeddingFetcher(
            layout,
            lambda layout, memory: self._node(layout, memory, host_settings(own)),
            max_bytes=int(self._settings.embedding_cache_gb * (1 << 30)),
            counter=self._process.embeddings,
            source_tokens=engine.limits.source_tokens,
        )
        self._parts.on_stop("embeddings", fetcher.close)
        return PromptImageSource(reader, fetcher, can_await_images=engine.can_await_images)

    async def _encoding(self, engine: ImageEncoder, connections: ModelConnections) -> EncodingServer:
        """Start the transfer of embeddings, and return the server of an image encoder."""
        self._rpc = connections.rpc
        settings = host_settings(transfer_settings(self._settings, connections.key))
        self.transfer = transfer = self._node(engine.layout, engine.memory, settings)
        await transfer.start()
        self._parts.on_stop("transfer", transfer.close)
        return EncodingServer(
            self.identity,
            engine=cast("EngineThread[ImageEncoder]", self.thread),
            reader=engine.reader,
            stats=engine.stats(),
            router=connections.rpc,
            events=self.events,
            transfer=transfer,
        )

    def _pooling(self, engine: PoolingEngine, rpc: InstanceServer) -> PoolingServer:
        """Return a new server for a model that computes vectors, such as embeddings."""
        self._rpc = rpc
        thread = cast("EngineThread[PoolingEngine]", self.thread)
        return PoolingServer(
            self.identity,
            engine=thread,
            stats=engine.stats(),
            router=rpc,
            events=self.events,
            reader=engine.image_reader,
        )


def engine_thread(settings: InstanceSettings, process: ProcessParts, weights_version: str = "") -> AnyEngineThread:
    """Return the thread, not started yet, that builds and runs the engine for the kind of model that the settings name.

    Raises `StartFailed` if a flag or the role does not fit the model.
    """
    role, slicer, watchdog = process.role, process.slicer, process.watchdog
    if role == "encode":
        counter = process.embeddings
        return EngineThread(lambda: build_image_encoder(settings, counter, weights_version), slicer, watchdog)
    kind = model_kind(settings)
    if kind == "generate":
        thread: EngineThread[Engine] = EngineThread(
            lambda: build_engine(settings, role, thread.give_up, weights_version, process.nodes), slicer, watchdog
        )
        return thread
    if settings.enable_lora:
        raise StartFailed(
            f"--enable-lora is only supported for models that generate text, and {settings.model} computes vectors"
        )
    if role == "decode":
        raise StartFailed(
            f"{settings.model} computes vectors (--task {kind}), which only prefill and unified instances do:"
            " start a unified instance instead, or set --runner generate"
        )
    pooling: EngineThread[PoolingEngine] = EngineThread(
        lambda: build_pooling_engine(settings, role, kind, pooling.give_up), slicer, watchdog
    )
    return pooling


def host_settings(settings: TransferSettings) -> TransferSettings:
    """Return the settings for a node with embeddings, which lie in host memory of different processes: a transport
    between devices or within one process does not fit them.
    """
    if set(settings.transports) <= {"usm", "zeromq"}:
        return settings
    return msgspec.structs.replace(settings, transports=("auto",))


def transfer_settings(
    settings: InstanceSettings, key: ClusterKey | None = None, access: PeerAccess = "", *, parts: int = 1
) -> TransferSettings:
    """Return the settings of the instance's `TransferNode`. `key` encrypts its connections, `access` is the value of
    CCL_TOPO_P2P_ACCESS, and `parts` is the number of layer groups that the engine reports.
    """
    return TransferSettings(
        bind=tcp(settings, settings.transfer_port, any_port="*"),
        advertise_host=settings.advertise_host,
        transports=(settings.kv_transport,),
        peer_access=access,
        run_dir=settings.kv_run_dir,
        parts=parts,
        checksum=settings.kv_checksum,
        zeromq_connections=settings.kv_zeromq_connections,
        lease_s=settings.kv_lease_s,
        curve_secret_key=key.secret if key is not None else b"",
        curve_public_key=key.public if key is not None else b"",
    )

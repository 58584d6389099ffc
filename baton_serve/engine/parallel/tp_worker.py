"""Executes rank 0's commands (load, step, copy) in the process of another tensor- or pipeline-parallel rank.

    python -m baton_serve.engine.parallel.tp_worker DESCRIPTOR PID

It is started by process PID and ends with it. It executes the commands that come through the socket, one after another.
On another host than rank 0's, a process of `services.instance.nodes` connects the socket and calls `run_rank`.
"""

import logging
import os
import select
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol

import torch

from baton_serve.engine import device as devices
from baton_serve.engine.collectives.backends import Collectives
from baton_serve.engine.collectives.world import World, place_of
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.errors import CapacityError, ConfigError, EngineError, ModelError, UnsupportedModelError
from baton_serve.engine.execution.engine_setup import EngineSetup
from baton_serve.engine.execution.executor import LocalExecutor
from baton_serve.engine.kv.capacity import cache_bytes
from baton_serve.engine.kv.host_slots import HostSlots
from baton_serve.engine.kv.kv_cache import BlockPart, KVCache, KVMemoryKind
from baton_serve.engine.kv.state_memory import StatePiece, make_states, pieces_of
from baton_serve.engine.loading.loader_choice import load
from baton_serve.engine.model.lora.store import AdapterStore
from baton_serve.engine.model.pipeline_stage import StagedForward
from baton_serve.engine.parallel.channel import Channel, ChannelError
from baton_serve.engine.parallel.commands import (
    AwaitTierCopies,
    BuildCache,
    BuildHostTier,
    CaptureGraphs,
    ChangeStates,
    CheckSlots,
    Command,
    CommandDone,
    CommandFailed,
    Compute,
    ConnectPart,
    CopyBlocks,
    CopyTierBlocks,
    DropAdapter,
    FinishStep,
    FromHost,
    GatherLogits,
    JoinGroup,
    KeepAdapter,
    LoadRank,
    MeasureMemory,
    PartBuilt,
    PartBytes,
    RankLoaded,
    Replay,
    ReportMemory,
    SetSampledTokens,
    SlotsChecked,
    StateBytes,
    StoreLastTokens,
    ToHost,
    decode_arrays,
    image_rows,
    kept_slots,
    source_rows,
    step_arrays,
)
from baton_serve.engine.parallel.part_links import ExecutedCommands, OwnPart, ServePart
from baton_serve.engine.parallel.ranks import SEND_TIMEOUT_S

logger = logging.getLogger(__name__)

ErrorKind = Literal["config", "model", "unsupported", "capacity", "other"]
_KINDS: list[tuple[type[EngineError], ErrorKind]] = [  # subclasses before their base class
    (UnsupportedModelError, "unsupported"),
    (ModelError, "model"),
    (ConfigError, "config"),
    (CapacityError, "capacity"),
]


_folders: list[Path] = []
"""Folders of rank 0 that this process removes if rank 0 is killed."""


class TPWorker:
    """Loads one rank's part of a model and executes the commands that rank 0 sends. It lives as long as the rank's
    process.
    """

    def __init__(
        self,
        channel: Channel[Command],
        folders: Mapping[str, str] | None = None,
        serve_part: ServePart | None = None,
    ) -> None:
        """Wait for rank 0's first command on `channel`, and load this rank's part of the model as that command says.
        Raises `EngineError` if loading fails.

        `folders` are those of models on this host, by their path on rank 0's host; None: it is the same host.
        `serve_part` moves this rank's part of KV blocks between instances; None: it is moved by rank 0 alone.
        """
        self._channel, self._is_remote = channel, folders is not None
        self._serve_part, self._commands = serve_part, ExecutedCommands()
        first = channel.receive(None)
        if isinstance(first, ReportMemory):
            device = devices.select_device(first.config.device, first.rank % first.config.ranks_per_node)
            self._answer(devices.memory(device).free_bytes)
            first = channel.receive(None)
        if not isinstance(first, LoadRank):
            raise ChannelError(f"the first command is {type(first).__name__}")
        # Use as many CPU threads as rank 0.
        torch.set_num_threads(first.threads)
        config = first.config
        # Each host has the model in a folder of its own, for example in the cache of another user.
        config = replace(config, model=(folders or {}).get(config.model, config.model))
        self._config = config
        self._place = place_of(first.rank, config.tensor_parallel_size, first.num_layers)
        self._device = devices.select_device(config.device, first.rank % config.ranks_per_node)
        self._model = load(config, self._device, lambda what, fraction: None, self._place.shard, self._place.stage)
        self._cache: KVCache | None = None
        self._host: HostSlots | None = None
        """This rank's part of the host tier; None without one, or if rank 0 keeps whole blocks."""
        self._memory_before = 0

    def serve(self) -> None:
        """Report that the model is loaded, and execute commands until rank 0 closes the channel, which raises
        `ChannelError` after the host tier of this rank was freed.
        """
        self._channel.send(self._channel.encode(RankLoaded(self._model.cached, self._model.fingerprint)))
        try:
            while True:
                self.do(self._channel.receive(None))
                self._commands.reach(self._channel.num_received)
        except ChannelError:
            # Not after other errors: rank 0 gets their reason, and the device may not answer any more.
            if self._host is not None:
                self._host.close()
            raise

    def do(self, command: Command) -> None:
        """Execute one command of rank 0, and answer it if rank 0 expects an answer."""
        # Steps come first: they are frequent, and each comparison costs time in every step.
        match command:
            case Replay():
                self._executor.replay(decode_arrays(command))
            case Compute():
                self._compute(command)
            case FinishStep():
                self._finish(command)
            case GatherLogits():
                self._executor.logits(command.count)
            case SetSampledTokens():
                self._executor.set_sampled_tokens(self._receive_tokens(command.count))
            case StoreLastTokens():
                slots = kept_slots(command)
                self._executor.store_last_tokens(self._receive_tokens(len(slots)), slots)
            case CopyBlocks() | CopyTierBlocks() | AwaitTierCopies():
                self._start_copies(command)
            case ToHost() | FromHost():
                self._copy(command)
            case ChangeStates():
                self._change_states(command)
            case _:
                self._prepare(command)

    def _start_copies(self, command: CopyBlocks | CopyTierBlocks | AwaitTierCopies) -> None:
        """Queue copies of blocks on the device, or from and to the host tier, or let the device wait for the latter."""
        match command:
            case CopyBlocks():
                self._blocks.copy_blocks(command.sources, command.targets)
            case CopyTierBlocks():
                self._slots.forget_ended()
                self._slots.copy(
                    command.blocks, command.slots, is_to_host=command.is_to_host, steps_after=command.steps_after
                )
            case AwaitTierCopies():
                self._blocks.order_after_copies(command.blocks)

    def _change_states(self, command: ChangeStates) -> None:
        """Copy recurrent states to or from a checkpoint and answer, or change them without an answer."""
        if command.data is not None:
            self._states.write(command.slot, command.data)
        elif self._is_remote and command.kind == "save":
            saved = StateBytes(command.blocks, self._states.read(command.slot))
            self._channel.send(self._channel.encode(saved))
            return
        else:
            self._states.change(command.kind, command.slot, command.blocks, command.source)
        if command.blocks:
            self._answer(0)

    def _copy(self, command: ToHost | FromHost) -> None:
        """Copy blocks to or from the mirror, or on another host to or from messages, and answer."""
        if isinstance(command, ToHost) and self._is_remote:
            part = PartBytes(command.blocks, self._blocks.read_part(command.blocks, command.steps_after))
            self._channel.send(self._channel.encode(part))
            return
        if isinstance(command, ToHost):
            self._blocks.to_host(command.blocks, command.steps_after)
        elif command.data is not None:
            self._blocks.write_part(command.blocks, command.data)
        else:
            self._blocks.from_host(command.blocks)
        self._answer(0)

    def _prepare(self, command: Command) -> None:
        """Execute a command that is not part of a step: one of the start of the engine, one that changes the LoRA
        adapters, or a check of the host tier.
        """
        match command:
            case KeepAdapter():
                self._adapters.follow(command.name, command.folder, command.fingerprint)
            case DropAdapter():
                self._adapters.forget(command.fingerprint)
            case JoinGroup():
                self._join(command)
            case BuildCache():
                self._build(command)
            case MeasureMemory():
                used = devices.peak_bytes(self._device) - self._memory_before
                self._blocks.close()
                # The executor holds views of the cache, which would keep its memory.
                del self._executor, self._states
                activation = used * command.work_factor + command.extra_bytes
                self._answer(cache_bytes(self._config, self._device, activation))
            case CaptureGraphs():
                self._executor.capture_graphs(lambda: devices.Capturing(self._device))
                self._answer(int(self._executor.has_graphs))
            case BuildHostTier():
                self._host = HostSlots(self._blocks, command.num_slots)
                self._answer(0)
            case CheckSlots():
                damaged = sorted(self._slots.find_damaged(command.slots))
                self._channel.send(self._channel.encode(SlotsChecked(damaged)))
            case ConnectPart():
                self._connect_part()
            case _:
                raise ChannelError(f"{type(command).__name__} must be sent only once")

    def _connect_part(self) -> None:
        """Hand the socket that follows to the program that moves this rank's part of blocks, if there is one; then
        answer.
        """
        connection = socket.socket(fileno=self._channel.receive_descriptor())
        if self._serve_part is None:
            connection.close()
        else:
            self._serve_part(connection, OwnPart(self._blocks, self._commands))
        self._answer(int(self._serve_part is not None))

    def _join(self, command: JoinGroup) -> None:
        """Connect with the other ranks, and build what needs their collectives, such as the model's forward."""
        if not command.store.startswith("tcp://"):
            _folders.append(Path(command.store).parent)
        world, model, config = World(command.store, self._place, self._device), self._model, self._config
        self._group = world.collectives(maps_memory=not config.disable_custom_all_reduce and config.nnodes == 1)
        links = world.links(torch.empty((0, model.hidden_size), dtype=model.dtype, device=self._device))
        self._answer(0)  # answer first: rank 0 builds its setup at the same time
        self._model = model.joined(command.stages)
        self._setup = EngineSetup(self._config, self._model, self._device, self._group, links)

    @torch.inference_mode()
    def _finish(self, command: FinishStep) -> None:
        """Take part in computing the logits of a step that has passed all pipeline stages. Only ranks of the first
        stage do.
        """
        forward = self._setup.forward
        assert isinstance(forward, StagedForward)
        if command.has_logits:
            forward.finish(command.count)
        else:
            forward.discard(command.count)

    def _build(self, command: BuildCache) -> None:
        """Create this rank's KV cache, on rank 0's host in memory that all ranks there share, and the executor that
        uses it; then answer.
        """
        descriptor = None if self._is_remote else self._channel.receive_descriptor()
        if self._cache is not None:
            self._cache.close()
        place: KVMemoryKind | None = "device" if self._is_remote else "mirrored"
        setup = self._setup
        limits = replace(setup.limits, max_num_seqs=command.num_slots, num_spare_rows=command.num_spare_rows)
        self._cache = KVCache(
            setup.layout,
            command.num_blocks,
            self._device,
            shared_fd=descriptor,
            part=setup.part,
            place=place if self._config.nnodes > 1 else None,
        )
        self._memory_before = devices.reset_peak(self._device)
        self._states = make_states(setup.states, limits.num_state_rows, self._cache, setup.first_state)
        self._executor = LocalExecutor(
            setup.forward,
            self._cache,
            limits,
            self._states.views,
            setup.kernels.argmax,
            no_images=setup.no_images,
        )
        if self._is_remote:
            pieces = pieces_of(setup.states, setup.layout.block_bytes, setup.first_state or 0)
            self._channel.send(self._channel.encode(_built(setup.part, pieces)))
        else:
            self._answer(0)

    @property
    def _adapters(self) -> AdapterStore:
        assert self._setup.adapters is not None  # rank 0 has the same settings
        return self._setup.adapters

    @property
    def _slots(self) -> HostSlots:
        assert self._host is not None  # rank 0 builds the host tier before it uses it
        return self._host

    @property
    def _blocks(self) -> KVCache:
        assert self._cache is not None
        return self._cache

    @torch.inference_mode()
    def _compute(self, command: Compute) -> None:
        # Rank 0 broadcasts one image after another, in the order in which the command lists them.
        images = [image_rows(place, self._device, self._group.broadcast) for place in command.images]
        sources = [source_rows(place, self._device, self._receive_source) for place in command.sources]
        self._executor.compute(step_arrays(command, images, sources))

    def _receive_source(self, values: torch.Tensor) -> None:
        """Fill `values` with those of rank 0: within the first stage of a pipeline, and from there through the
        others."""
        if self._place.stage.is_first:
            self._group.broadcast(values)
        if isinstance(forward := self._setup.forward, StagedForward):
            forward.links.pass_on(values)

    def _receive_tokens(self, count: int) -> torch.Tensor:
        """Return `count` tokens that rank 0 broadcasts, int64 on the device."""
        tokens = torch.empty(count, dtype=torch.int64, device=self._device)
        self._group.broadcast(tokens)
        return tokens

    def _answer(self, value: int) -> None:
        self._channel.send(self._channel.encode(CommandDone(value)))


def end_with(parent: int, leave: Callable[[int], None] = os._exit) -> None:
    """Wait until the process with the id `parent` has exited, and then end this process by `leave`. It runs in a
    thread.

    A collective may wait forever for rank 0, so a normal exit could be blocked.
    """
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        leave(1)
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    for folder in _folders:
        shutil.rmtree(folder, ignore_errors=True)
    leave(1)


def connect(store: str, config: EngineConfig, rank: int, device: torch.device) -> Collectives:
    """Connect the rank with the number `rank` with the others of a model that is not divided into stages. They find
    each other at `store` (see `World`).
    """
    if not store.startswith("tcp://"):
        _folders.append(Path(store).parent)
    world = World(store, place_of(rank, config.tensor_parallel_size, ()), device)
    return world.collectives(maps_memory=not config.disable_custom_all_reduce)


def _built(part: BlockPart | None, states: list[StatePiece]) -> PartBuilt:
    """Return the answer that describes this rank's part of every block and checkpoint."""
    assert part is not None  # there are several ranks
    layers = None if part.layers is None else (part.layers.start, part.layers.stop)
    heads = None if part.heads is None else tuple((one.start, one.stop) for one in part.heads)
    return PartBuilt(layers, heads, states)


def failure(error: EngineError) -> CommandFailed:
    """Return the answer that reports `error` to rank 0, which raises an error of the same kind."""
    kind: ErrorKind = next((kind for made, kind in _KINDS if isinstance(error, made)), "other")
    return CommandFailed(kind, str(error))


class RankWorker(Protocol):
    """One rank's part of a loaded model."""

    def serve(self) -> None: ...


MakeWorker = Callable[[Channel[Command]], RankWorker]
"""Loads a rank's part of a model, as the first command on the channel says."""


def main(arguments: Sequence[str], make: MakeWorker = TPWorker) -> int:
    """Run one rank of an engine in this process, and return its exit status: 0 after rank 0 has closed the channel, 1
    after an error. `arguments` are the descriptor of the socket to rank 0 and the id of rank 0's process. `make` loads
    the rank's part.
    """
    descriptor, parent = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which ends this process afterwards
    logging.basicConfig(level=logging.WARNING)
    # Start this before anything is loaded: rank 0 may exit during loading.
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    return run_rank(socket.socket(fileno=descriptor), make)


def run_rank(connection: socket.socket, make: MakeWorker) -> int:
    """Execute the commands of rank 0 that come through `connection` by the worker that `make` returns, and return the
    exit status: 0 after rank 0 has closed it.
    """
    channel: Channel[Command] = Channel(connection, Command, send_timeout_s=SEND_TIMEOUT_S)
    try:
        make(channel).serve()
    # Rank 0 has closed the channel: the normal end.
    except ChannelError:
        return 0
    except EngineError as error:
        channel.send(channel.encode(failure(error)))
        return 1
    except BaseException as error:  # noqa: BLE001 - the process ends; rank 0 reads the reason as an answer
        traceback.print_exc()
        channel.send(channel.encode(CommandFailed("other", f"{type(error).__name__}: {error}")))
        return 1
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # not sys.exit: device libraries may wait for ranks that have exited

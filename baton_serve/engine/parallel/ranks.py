"""Starts the processes of the other tensor- and pipeline-parallel ranks, sends them commands and detects their exit.

Ranks on other hosts are started there (`services.instance.nodes`), and connect to this one. If one rank exits, or a
host falls silent, the whole instance ends. Used from the engine's thread. A watcher thread reports ranks that have
exited, since the engine's thread may be waiting for the device, which in turn waits for the lost rank.
"""

import logging
import os
import select
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import msgspec
import numpy as np
import torch

from baton_serve.child_command import module_command
from baton_serve.engine import device as devices
from baton_serve.engine.collectives.backends import Collectives, SingleRank
from baton_serve.engine.collectives.stage_layers import partition_layers
from baton_serve.engine.collectives.stage_links import StageLinks
from baton_serve.engine.collectives.world import RankPlace, World, place_of
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.errors import CapacityError, ConfigError, EngineError, ModelError, UnsupportedModelError
from baton_serve.engine.kv.kv_cache import BlockPart, KVCache, PartCopies
from baton_serve.engine.kv.state_memory import CheckpointPart
from baton_serve.engine.loading.loader_choice import count_layers
from baton_serve.engine.model.loaded_model import LoadedModel, StageCache
from baton_serve.engine.model.lora.adapter_files import Adapter
from baton_serve.engine.parallel.channel import Channel, ChannelError
from baton_serve.engine.parallel.commands import (
    BuildCache,
    CaptureGraphs,
    ChangeStates,
    Command,
    CommandAnswer,
    CommandDone,
    CommandFailed,
    ConnectPart,
    DropAdapter,
    FromHost,
    JoinGroup,
    KeepAdapter,
    LoadRank,
    MeasureMemory,
    PartBuilt,
    PartBytes,
    RankLoaded,
    ReportMemory,
    StateBytes,
)
from baton_serve.engine.parallel.part_links import PartLink

logger = logging.getLogger(__name__)
T = TypeVar("T")

LOAD_TIMEOUT_S = 1800.0
"""Longest time for loading a shard, in seconds."""
ANSWER_TIMEOUT_S = 300.0
"""Longest wait for any other answer, in seconds; compiling kernels takes most of it."""
SEND_TIMEOUT_S = 30.0
"""Longest wait until a rank accepts a command, in seconds."""
END_TIMEOUT_S = 5.0
"""Time in seconds that ranks and libraries have to end by themselves, before the ranks are killed."""

DECODER_RANK, POOLING_RANK = "baton_serve.engine.parallel.tp_worker", "baton_serve.engine.pooling.pooling_tp_worker"
"""Modules that the other ranks run: those of models that generate text, and of pooling models."""

OnLost = Callable[[str], None]
"""Called with a message when a rank has exited, from the watcher's thread."""

_ERRORS: dict[str, type[EngineError]] = {
    "config": ConfigError,
    "model": ModelError,
    "unsupported": UnsupportedModelError,
    "capacity": CapacityError,
}
"""Types of errors by the kind that a rank reports, so that a rank's error looks like rank 0's own."""


class RemoteRanks(Protocol):
    """Gives the connections to the ranks on other hosts, and the address at which those reach this host.

    A connection ends within seconds if its host falls silent: its socket has keepalive probes.
    """

    @property
    def address(self) -> str: ...
    def connect(self) -> Mapping[int, socket.socket]:
        """Wait until all ranks on other hosts are there, and return new connections to them by the number of the rank.

        Raises `ChannelError` if one is missing for too long.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Rank:
    """A started rank, as rank 0 sees it: its process, None on another host, and the channel to it."""

    number: int
    process: "subprocess.Popen[bytes] | None"
    channel: Channel[CommandAnswer]


class Ranks:
    """Starts, commands and ends the other ranks of an engine; used by rank 0. With a single rank the methods do
    nothing.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_lost: OnLost | None = None,
        remote: RemoteRanks | None = None,
        kind: Literal["generate", "embed", "classify"] = "generate",
        program: str | None = None,
    ) -> None:
        """Start the processes of the other ranks, which begin to load the model. `on_lost` is called with a message
        when a rank has exited unexpectedly: at most once, from another thread. `remote` connects the ranks on other
        hosts, if there are any. `kind` is what the model computes. `program` is the module that ranks of models which
        generate text run, if it is not `DECODER_RANK`: it moves their parts of blocks too.
        """
        self.num_ranks, self._ranks_per_node = config.num_ranks, config.ranks_per_node
        self.place: RankPlace = place_of(0, config.tensor_parallel_size, ())
        # Devices of different hosts cannot write into each other's memory.
        self._maps_memory = not config.disable_custom_all_reduce and config.nnodes == 1
        self._remote = remote
        self.group: Collectives = SingleRank()
        self.links: StageLinks | None = None
        self._world: World | None = None
        self._ranks: list[_Rank] = []
        self._copies: dict[int, PartCopies] = {}
        """By rank on another host: access to its part of the blocks in this host's memory."""
        self._checkpoints: dict[int, CheckpointPart] = {}
        """By rank on another host: access to its part of checkpoints of recurrent states in this host's memory."""
        self._unanswered = 0
        self._on_lost = on_lost or _ignore_lost_rank
        self._folder: Path | None = None
        self._is_closing = threading.Event()
        self._moves_parts = False
        if self.num_ranks == 1:
            return
        if config.nnodes > 1 and remote is None:
            raise ConfigError("nnodes is more than 1, which only baton prefill, decode and unified support")
        own = program or DECODER_RANK if kind == "generate" else POOLING_RANK
        self._moves_parts = program is not None and config.nnodes == 1
        self._ranks = [_start(number, own) for number in range(1, self._ranks_per_node)]
        try:
            self._connect()
            num_layers = self._divide(config)
        except BaseException:
            self._abandon()
            raise
        self.place = place_of(0, config.tensor_parallel_size, num_layers)
        for rank in self._ranks:
            # The ranks begin to load immediately, in parallel with rank 0.
            self._send([rank], LoadRank(config, rank.number, torch.get_num_threads(), num_layers, kind))
        # Closing the write end wakes the watcher, which otherwise sleeps until a rank exits.
        self._wake, self._woken = os.pipe()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def _connect(self) -> None:
        """Add the ranks on other hosts. Raises `ChannelError` if one is missing for too long."""
        if self._remote is not None:
            for number, connection in sorted(self._remote.connect().items()):
                channel: Channel[CommandAnswer] = Channel(connection, CommandAnswer, send_timeout_s=SEND_TIMEOUT_S)
                self._ranks.append(_Rank(number, None, channel))

    def _divide(self, config: EngineConfig) -> tuple[int, ...]:
        """Return the number of layers of each pipeline stage, by the setting or by the free memory of the ranks; ()
        without a pipeline. Raises `ConfigError` if the layers cannot be divided in this way.
        """
        count, size = config.pipeline_parallel_size, config.tensor_parallel_size
        if count == 1:
            return ()
        device = devices.select_device(config.device)
        memory: list[float] | None = None
        if config.pipeline_layer_partition is None and not devices.is_host(device):
            for rank in self._ranks:
                self._send([rank], ReportMemory(config, rank.number))
            free = [devices.memory(device).free_bytes, *map(_value, self._collect(ANSWER_TIMEOUT_S))]
            # A stage has as much memory as the smallest of its devices.
            memory = [float(min(free[start : start + size])) for start in range(0, len(free), size)]
        stages = partition_layers(count_layers(config), count, config.pipeline_layer_partition, memory)
        logger.info("pipeline of %d stages with %s layers", count, ", ".join(map(str, stages)))
        return stages

    def join_group(self, device: torch.device, model: LoadedModel) -> LoadedModel:
        """Wait until all ranks have loaded their parts, and connect the ranks. Call it when rank 0 has loaded its part,
        `model`. Return `model` with what all pipeline stages keep. Raises the error of a rank that failed to load.
        """
        if not self._ranks:
            return model
        loaded = self._collect(LOAD_TIMEOUT_S)
        for rank, answer in zip(self._ranks, loaded, strict=True):
            if rank.process is None and isinstance(answer, RankLoaded) and answer.fingerprint != model.fingerprint:
                raise ModelError(f"{self._name(rank)} has other weights of {model.name}: give every host equal files")
        stages: tuple[StageCache, ...] = ()
        if self.place.num_stages > 1:
            every = [model.cached, *(answer.cached for answer in loaded if isinstance(answer, RankLoaded))]
            # The ranks of a stage have equal ones, so the first one stands for all.
            stages = tuple(every[:: self.place.shard.size])
        world = self._form(stages, device)
        self.links = world.links(torch.empty((0, model.hidden_size), dtype=model.dtype, device=device))
        self._end_forming(device)
        return model.joined(stages)

    def join_pooling_group(self, device: torch.device) -> None:
        """Wait until all ranks have loaded their parts of a pooling model, and connect the ranks. Raises the error of a
        rank that failed to load.
        """
        if self._ranks:
            self._collect(LOAD_TIMEOUT_S)
            self._form((), device)
            self._end_forming(device)

    def _end_forming(self, device: torch.device) -> None:
        """Wait until the other ranks have joined the group."""
        self._collect(ANSWER_TIMEOUT_S)
        # All groups are formed. Libraries of devices go on using the store; gloo does not, so that nothing is left
        # behind if this process is killed.
        if devices.is_host(device):
            self._remove_folder()

    def _form(self, stages: tuple[StageCache, ...], device: torch.device) -> World:
        """Form the process groups of all ranks, which find each other by a new store, and return them."""
        # Send first: forming the groups waits until every rank has joined.
        if self._remote is not None:
            # Bound to this address alone: whoever reaches the store can disturb the start.
            address = self._remote.address
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket.create_server((address, 0), family=family) as listener:
                store = f"tcp://{address}:{listener.getsockname()[1]}"
                self.send_command(JoinGroup(store, stages))
                self._world = World(store, self.place, device, listener)
        else:
            self._folder = Path(tempfile.mkdtemp(prefix="baton-ranks-"))
            store = str(self._folder / "store")
            self.send_command(JoinGroup(store, stages))
            self._world = World(store, self.place, device)
        self.group = self._world.collectives(maps_memory=self._maps_memory)
        return self._world

    def send_command(self, command: Command, *, to_first_stage: bool = False) -> None:
        """Send a command to all other ranks without waiting for its execution. With `to_first_stage`, send it only to
        the ranks of the first pipeline stage. Raises `ChannelError` if a rank does not accept it.
        """
        self._send(self._ranks[: self.place.shard.size - 1] if to_first_stage else self._ranks, command)

    def kept(self, adapter: Adapter) -> None:
        """Make the other ranks keep their parts of an adapter's weights, after rank 0 has kept its own. Implements
        `AdapterListener`.
        """
        # No answer is needed: ranks execute commands in order, so the adapter is there before a step that uses it.
        self.send_command(KeepAdapter(adapter.name, adapter.path, adapter.fingerprint))

    def dropped(self, fingerprint: str) -> None:
        """Make the other ranks free the weights of the adapter with this fingerprint, after rank 0 has freed its own.
        Implements `AdapterListener`.
        """
        self.send_command(DropAdapter(fingerprint))

    def query_ranks(self, command: Command, timeout_s: float = ANSWER_TIMEOUT_S) -> list[int]:
        """Send a command to all other ranks, wait at most `timeout_s` seconds, and return the number that each has
        answered. Raises `EngineError` if a rank fails or does not answer.
        """
        return [_value(answer) for answer in self.execute(command, lambda: None, timeout_s)[1]]

    def execute(
        self, command: Command, here: Callable[[], T], timeout_s: float = ANSWER_TIMEOUT_S
    ) -> tuple[T, list[CommandAnswer]]:
        """Send a command to all other ranks, and do rank 0's part by `here` at the same time. Return its result, and
        the answers of the others. Raises `EngineError` if a rank fails or does not answer.
        """
        self.wait()
        self.send_command(command)
        return here(), self._collect(timeout_s)

    def expect_answer(self, command: Command) -> None:
        """Send a command to all other ranks without waiting. Call `wait` later: it reads the answers. Raises
        `ChannelError` if a rank does not accept the command.
        """
        local = [rank for rank in self._ranks if rank.process is not None]
        self._send(local, command)
        for rank in self._ranks[len(local) :]:
            # A rank on another host cannot read the memory itself.
            data: memoryview | None = None
            if isinstance(command, FromHost):
                data = self._copies[rank.number].read(command.blocks)
            elif isinstance(command, ChangeStates) and command.kind == "restore":
                data = self._checkpoints[rank.number].read(command.blocks).numpy().data
            self._send([rank], command if data is None else msgspec.structs.replace(command, data=data))
        self._unanswered += 1

    def wait(self) -> None:
        """Wait until all ranks have answered every command of `expect_answer`. Raises `EngineError` if a rank fails or
        does not answer in time.
        """
        while self._unanswered:
            self._unanswered -= 1
            for rank, answer in zip(self._ranks, self._collect(ANSWER_TIMEOUT_S), strict=True):
                if isinstance(answer, PartBytes):
                    self._copies[rank.number].write(answer.blocks, answer.data)
                elif isinstance(answer, StateBytes):
                    row = torch.from_numpy(np.frombuffer(bytearray(answer.data), dtype=np.uint8))
                    self._checkpoints[rank.number].write(answer.blocks, row)

    def build(self, cache: KVCache, num_slots: int, num_spare_rows: int) -> None:
        """Make the other ranks create KV caches like `cache`, whose host memory holds all ranks' blocks, or copies of
        them, and the recurrent states of `num_slots` batch slots with `num_spare_rows` spare rows. The caller keeps
        `cache` open as long as ranks copy blocks.
        """
        self.send_command(BuildCache(cache.num_blocks, num_slots, num_spare_rows))
        for rank in self._ranks:
            if rank.process is not None:
                assert cache.shared_fd is not None  # there are several ranks
                rank.channel.send_descriptor(cache.shared_fd)
        answers = zip(self._ranks, self._collect(ANSWER_TIMEOUT_S), strict=True)
        built = {rank.number: answer for rank, answer in answers if isinstance(answer, PartBuilt)}
        self._copies = {number: cache.copies_of(_part(answer)) for number, answer in built.items()}
        if built:
            whole = cache.whole_blocks
            self._checkpoints = {number: CheckpointPart(answer.states, whole) for number, answer in built.items()}

    def connect_parts(self, cache: KVCache) -> list[PartLink]:
        """Return a new connection to the transfers of each other rank, which the caller owns; none if rank 0 moves
        whole blocks alone: ranks that share the memory of `cache`, or that are on other hosts.
        """
        if not self._moves_parts or not cache.is_mirrored:
            return []
        links: list[PartLink] = []
        for rank in self._ranks:
            ours, its = socket.socketpair()
            with its:
                self._send([rank], ConnectPart())
                rank.channel.send_descriptor(its.fileno())
            links.append(PartLink(rank.number, ours, partial(getattr, rank.channel, "num_sent")))
        served = self._collect(ANSWER_TIMEOUT_S)
        if all(map(_value, served)):
            return links
        for link in links:
            link.connection.close()
        return []

    def available_bytes(self, own: int, measure: MeasureMemory) -> list[int]:
        """Return the bytes that each rank has for its part of the KV cache, rank 0 first. `own` is the number of rank
        0; the others measure theirs by the command `measure`.
        """
        return [own, *self.query_ranks(measure)]

    def capture(self, capture_here: Callable[[], bool]) -> list[bool]:
        """Capture graphs on all ranks at the same time; `capture_here` does it on rank 0 and returns whether it
        succeeded. Return for each rank whether it did.
        """
        # At the same time, because capturing runs the collectives, which need every rank.
        own, answers = self.execute(CaptureGraphs(), capture_here)
        return [own, *(bool(_value(answer)) for answer in answers)]

    def close(self) -> None:
        """End the processes of the other ranks. They exit when their channel is closed, and are killed if they have not
        exited after some seconds.
        """
        # May be called again after an error during the start.
        if self._is_closing.is_set() or not self._ranks:
            return
        self._is_closing.set()
        for rank in self._ranks:
            rank.channel.close()
        # Ranks that have not joined the group are still loading; nothing has to end by itself there.
        deadline = time.monotonic() + (0.0 if self._world is None else END_TIMEOUT_S)
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        # The library may wait for a rank that has exited; this process must not wait with it.
        if self._world is not None:
            ending = threading.Thread(target=self._world.close, name="ranks-end", daemon=True)
            ending.start()
            ending.join(END_TIMEOUT_S)
            if ending.is_alive():
                logger.warning("the collective library did not end within %g s", END_TIMEOUT_S)
        os.close(self._woken)  # wakes the watcher
        self._watcher.join()
        self._remove_folder()

    def kill(self) -> None:
        """Kill the processes of the other ranks without waiting. It is for a process that is about to exit; callable
        from any thread.
        """
        # The watcher must not report the exits, which would start a regular stop. Ranks on other hosts notice the end
        # of this process.
        self._is_closing.set()
        for process in self._processes:
            process.kill()

    def _abandon(self) -> None:
        """Kill the other ranks because the engine cannot start, wait for them, and delete their folder. They have not
        begun to load.
        """
        self.kill()
        for rank in self._ranks:
            rank.channel.close()
        for process in self._processes:
            process.wait()

    def _remove_folder(self) -> None:
        """Remove the folder in which the ranks of this host have found each other."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _processes(self) -> "list[subprocess.Popen[bytes]]":
        """Return the processes of the ranks on this host."""
        return [rank.process for rank in self._ranks if rank.process is not None]

    def _name(self, rank: _Rank) -> str:
        """Return the name of a rank for messages."""
        node = "" if rank.process is not None else f" on node {rank.number // self._ranks_per_node}"
        return f"rank {rank.number} of {self.num_ranks}{node}"

    def _send(self, ranks: list[_Rank], command: Command) -> None:
        # Encode once for all ranks.
        frame = ranks[0].channel.encode(command) if ranks else b""
        for rank in ranks:
            rank.channel.send(frame)

    def _collect(self, timeout_s: float) -> list[CommandAnswer]:
        """Return one answer of each other rank, all received within `timeout_s` seconds. Raises `EngineError` if a rank
        reports a failure or does not answer.
        """
        # One deadline for all ranks, which work at the same time.
        deadline = time.monotonic() + timeout_s
        answers: list[CommandAnswer] = []
        for rank in self._ranks:
            try:
                answer = rank.channel.receive(max(0.001, deadline - time.monotonic()))
            except ChannelError as exc:
                raise ChannelError(f"{self._name(rank)}: {exc}") from exc
            if isinstance(answer, CommandFailed):
                where = "" if rank.process is not None else f"{self._name(rank)}: "
                raise _ERRORS.get(answer.kind, EngineError)(where + answer.message)
            answers.append(answer)
        return answers

    def _watch(self) -> None:
        """Wait until a rank exits or `close` is called, in the watcher's thread. If a rank has exited unexpectedly,
        call `on_lost` and abort the collectives that may wait for it.
        """
        poll = select.poll()
        # A pidfd becomes readable when its process exits, and it cannot refer to a new process with the same id.
        pidfds = {os.pidfd_open(rank.process.pid): rank for rank in self._ranks if rank.process is not None}
        for descriptor in [*pidfds, self._wake]:
            poll.register(descriptor, select.POLLIN | select.POLLHUP)
        # Of a connection only the end counts: the engine's thread reads what arrives.
        connections = {rank.channel.fileno(): rank for rank in self._ranks if rank.process is None}
        for descriptor in connections.keys() - {-1}:
            poll.register(descriptor, select.POLLRDHUP)
        watched = pidfds | connections
        ended = [watched[fd] for fd, _ in poll.poll() if fd in watched]
        for descriptor in [*pidfds, self._wake]:
            os.close(descriptor)
        if ended and not self._is_closing.is_set():
            end = "has exited; its error is in the log above"
            if ended[0].process is None:
                end = "is lost: it has exited, or its host does not answer; see the log there"
            message = f"{self._name(ended[0])} {end}"
            logger.error("%s", message)
            # Report first: `abort` makes the engine's thread fail, and the cause must be known by then.
            self._on_lost(message)
            # The engine's thread may wait in a collective for the lost rank: make it return.
            self.group.abort()
            if self.links is not None:
                self.links.abort()


def _ignore_lost_rank(why: str) -> None:
    """Do nothing when a rank has exited for the reason `why`, which is in the log already. Used as `on_lost` if the
    caller passes none."""


def _value(answer: CommandAnswer) -> int:
    """Return the number in a rank's answer; 0 for an answer without one."""
    return answer.value if isinstance(answer, CommandDone) else 0


def _part(answer: PartBuilt) -> BlockPart:
    """Return the part of each block that a rank on another host has described."""
    heads = None if answer.heads is None else tuple(slice(*one) for one in answer.heads)
    return BlockPart(None if answer.layers is None else slice(*answer.layers), heads)


def _start(number: int, program: str) -> _Rank:
    """Start the process of the rank `number`, which runs the module `program`, connected by one end of a socket pair,
    and return it with the channel to it.
    """
    ours, its = socket.socketpair()
    # Close this process's copy of the child's end; otherwise the child's exit would not close the connection.
    with its:
        command = module_command(program, str(its.fileno()), str(os.getpid()))
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[its.fileno()])
    return _Rank(number, process, Channel(ours, CommandAnswer, send_timeout_s=SEND_TIMEOUT_S))

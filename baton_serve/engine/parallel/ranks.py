"""Rank 0's side of tensor and pipeline parallelism: starts the other ranks, sends them commands and detects their exit.

If one rank exits, the whole instance ends. Used from the engine's thread. A watcher thread reports ranks that have
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
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from baton_serve.child_command import module_command
from baton_serve.contracts.layout import KVShape
from baton_serve.engine import device as devices
from baton_serve.engine.collectives.backends import Collectives, SingleRank
from baton_serve.engine.collectives.links import StageLinks
from baton_serve.engine.collectives.stage import partition_layers
from baton_serve.engine.collectives.world import RankPlace, World, place_of
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.errors import CapacityError, ConfigError, EngineError, ModelError, UnsupportedModelError
from baton_serve.engine.loading.loader_choice import count_layers
from baton_serve.engine.model.loaded_model import LoadedModel
from baton_serve.engine.model.lora.checkpoint import Adapter
from baton_serve.engine.parallel.channel import Channel, ChannelError
from baton_serve.engine.parallel.commands import (
    BuildCache,
    CaptureGraphs,
    Command,
    CommandAnswer,
    CommandDone,
    CommandFailed,
    DropAdapter,
    JoinGroup,
    KeepAdapter,
    LoadRank,
    MeasureMemory,
    RankLoaded,
    ReportMemory,
)

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 1800.0
"""Longest time for loading a shard, in seconds."""
ANSWER_TIMEOUT_S = 300.0
"""Longest wait for any other answer, in seconds; compiling kernels takes most of it."""
SEND_TIMEOUT_S = 30.0
"""Longest wait until a rank accepts a command, in seconds."""
END_TIMEOUT_S = 5.0
"""Time in seconds that ranks and libraries have to end by themselves, before the ranks are killed."""

OnLost = Callable[[str], None]
"""Called with a message when a rank has exited, from the watcher's thread."""

_ERRORS: dict[str, type[EngineError]] = {
    "config": ConfigError,
    "model": ModelError,
    "unsupported": UnsupportedModelError,
    "capacity": CapacityError,
}
"""Types of errors by the kind that a rank reports, so that a rank's error looks like rank 0's own."""


@dataclass(frozen=True, slots=True)
class _Rank:
    """A started rank, as rank 0 sees it: its process and the channel to it."""

    number: int
    process: "subprocess.Popen[bytes]"
    channel: Channel[CommandAnswer]


class Ranks:
    """Starts, commands and ends the other ranks of an engine; used by rank 0. With a single rank the methods do
    nothing.
    """

    def __init__(self, config: EngineConfig, on_lost: OnLost) -> None:
        """Start the processes of the other ranks, which begin to load the model. `on_lost` is called with a message
        when a rank has exited unexpectedly: at most once, from another thread.
        """
        self.num_ranks = config.num_ranks
        self.place: RankPlace = place_of(0, config.tensor_parallel_size, ())
        self._maps_memory = not config.disable_custom_all_reduce
        self.group: Collectives = SingleRank()
        self.links: StageLinks | None = None
        self._world: World | None = None
        self._ranks: list[_Rank] = []
        self._unanswered = 0
        self._on_lost = on_lost
        self._folder: Path | None = None
        self._is_closing = threading.Event()
        if self.num_ranks == 1:
            return
        self._folder = Path(tempfile.mkdtemp(prefix="baton-ranks-"))
        self._ranks = [_start(number) for number in range(1, self.num_ranks)]
        try:
            num_layers = self._divide(config)
        except BaseException:
            self._abandon()
            raise
        self.place = place_of(0, config.tensor_parallel_size, num_layers)
        for rank in self._ranks:
            # The ranks begin to load immediately, in parallel with rank 0.
            self._send([rank], LoadRank(config, rank.number, torch.get_num_threads(), num_layers))
        # Closing the write end wakes the watcher, which otherwise sleeps until a rank exits.
        self._wake, self._woken = os.pipe()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

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
        `model`. Return `model` with the KV shapes of all pipeline stages. Raises the error of a rank that failed to
        load.
        """
        if self._folder is None:
            return model
        loaded = self._collect(LOAD_TIMEOUT_S)
        shapes: tuple[tuple[KVShape, ...], ...] = ()
        if self.place.num_stages > 1:
            every = [model.kv_shapes, *(answer.kv_shapes for answer in loaded if isinstance(answer, RankLoaded))]
            # The ranks of a stage have equal shapes, so the first one stands for all.
            shapes = tuple(every[:: self.place.shard.size])
        store = str(self._folder / "store")
        # Send first: forming the group waits until every rank has joined.
        self.send_command(JoinGroup(store, shapes))
        self._world = World(store, self.place, device)
        self.group = self._world.collectives(maps_memory=self._maps_memory)
        self.links = self._world.links(torch.empty((0, model.hidden_size), dtype=model.dtype, device=device))
        self._collect(ANSWER_TIMEOUT_S)
        return replace(model, stage_shapes=shapes)

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
        self.wait()
        self._send(self._ranks, command)
        return [_value(answer) for answer in self._collect(timeout_s)]

    def expect_answer(self, command: Command) -> None:
        """Send a command to all other ranks without waiting. Call `wait` later: it reads the answers. Raises
        `ChannelError` if a rank does not accept the command.
        """
        self._send(self._ranks, command)
        self._unanswered += 1

    def wait(self) -> None:
        """Wait until all ranks have answered every command of `expect_answer`. Raises `EngineError` if a rank fails or
        does not answer in time.
        """
        while self._unanswered:
            self._unanswered -= 1
            self._collect(ANSWER_TIMEOUT_S)

    def build(self, num_blocks: int, descriptor: int | None) -> None:
        """Make the other ranks create KV caches of `num_blocks` blocks. `descriptor` is the open file of the host
        memory that holds all ranks' blocks, or copies of them; None, with a single rank, does nothing.
        """
        if descriptor is None:
            return
        self.send_command(BuildCache(num_blocks))
        for rank in self._ranks:
            rank.channel.send_descriptor(descriptor)
        self._collect(ANSWER_TIMEOUT_S)

    def available_bytes(self, own: int, measure: MeasureMemory) -> list[int]:
        """Return the bytes that each rank has for its part of the KV cache, rank 0 first. `own` is the number of rank
        0; the others measure theirs by the command `measure`.
        """
        return [own, *self.query_ranks(measure)]

    def capture(self, capture_here: Callable[[], bool]) -> None:
        """Capture graphs on all ranks at the same time; `capture_here` does it on rank 0 and returns whether it
        succeeded. Raises `EngineError` if only some ranks succeeded.
        """
        # At the same time, because capturing runs the collectives, which need every rank.
        self.send_command(CaptureGraphs())
        captured = [int(capture_here()), *map(_value, self._collect(ANSWER_TIMEOUT_S))]
        if len(set(captured)) > 1:
            raise EngineError("only some ranks could capture graphs; start with --enforce-eager")

    def close(self) -> None:
        """End the processes of the other ranks. They exit when their channel is closed, and are killed if they have not
        exited after some seconds.
        """
        # May be called again after an error during the start.
        if self._is_closing.is_set() or self._folder is None:
            return
        self._is_closing.set()
        for rank in self._ranks:
            rank.channel.close()
        # Ranks that have not joined the group are still loading; nothing has to end by itself there.
        deadline = time.monotonic() + (0.0 if self._world is None else END_TIMEOUT_S)
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
        # The library may wait for a rank that has exited; this process must not wait with it.
        if self._world is not None:
            ending = threading.Thread(target=self._world.close, name="ranks-end", daemon=True)
            ending.start()
            ending.join(END_TIMEOUT_S)
            if ending.is_alive():
                logger.warning("the collective library did not end within %g s", END_TIMEOUT_S)
        os.close(self._woken)  # wakes the watcher
        self._watcher.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """Kill the processes of the other ranks without waiting. It is for a process that is about to exit; callable
        from any thread.
        """
        # The watcher must not report the exits, which would start a regular stop.
        self._is_closing.set()
        for rank in self._ranks:
            rank.process.kill()

    def _abandon(self) -> None:
        """Kill the other ranks because the engine cannot start, wait for them, and delete their folder. They have not
        begun to load.
        """
        self.kill()
        for rank in self._ranks:
            rank.channel.close()
            rank.process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

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
                raise ChannelError(f"rank {rank.number} of {self.num_ranks}: {exc}") from exc
            if isinstance(answer, CommandFailed):
                raise _ERRORS.get(answer.kind, EngineError)(answer.message)
            answers.append(answer)
        return answers

    def _watch(self) -> None:
        """Wait until a rank exits or `close` is called, in the watcher's thread. If a rank has exited unexpectedly,
        call `on_lost` and abort the collectives that may wait for it.
        """
        poll = select.poll()
        # A pidfd becomes readable when its process exits, and it cannot refer to a new process with the same id.
        descriptors = {os.pidfd_open(rank.process.pid): rank for rank in self._ranks}
        for descriptor in [*descriptors, self._wake]:
            poll.register(descriptor, select.POLLIN | select.POLLHUP)
        ended = [descriptors[fd] for fd, _ in poll.poll() if fd in descriptors]
        for descriptor in [*descriptors, self._wake]:
            os.close(descriptor)
        if ended and not self._is_closing.is_set():
            message = f"rank {ended[0].number} of {self.num_ranks} has exited; its error is in the log above"
            logger.error("%s", message)
            # Report first: `abort` makes the engine's thread fail, and the cause must be known by then.
            self._on_lost(message)
            # The engine's thread may wait in a collective for the lost rank: make it return.
            self.group.abort()
            if self.links is not None:
                self.links.abort()


def _value(answer: CommandAnswer) -> int:
    """Return the number in a rank's answer; 0 for an answer without one."""
    return answer.value if isinstance(answer, CommandDone) else 0


def _start(number: int) -> _Rank:
    """Start the process of the rank `number`, connected by one end of a socket pair, and return it with the channel to
    it.
    """
    ours, its = socket.socketpair()
    # Close this process's copy of the child's end; otherwise the child's exit would not close the connection.
    with its:
        command = module_command("baton_serve.engine.parallel.tp_worker", str(its.fileno()), str(os.getpid()))
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[its.fileno()])
    return _Rank(number, process, Channel(ours, CommandAnswer, send_timeout_s=SEND_TIMEOUT_S))

"""Rank 0's side of tensor parallelism: starts the other ranks, sends them commands and detects their exit.

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
from dataclasses import dataclass
from pathlib import Path

import torch

from baton_serve.child_command import module_command
from baton_serve.engine.collectives.backends import Collectives, SingleRank, TorchCollectives
from baton_serve.engine.collectives.shard import Shard
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.errors import CapacityError, ConfigError, EngineError, ModelError, UnsupportedModelError
from baton_serve.engine.parallel.channel import Channel, ChannelError
from baton_serve.engine.parallel.commands import (
    BuildCache,
    CaptureGraphs,
    Command,
    CommandAnswer,
    CommandDone,
    CommandFailed,
    JoinGroup,
    LoadRank,
    MeasureMemory,
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
    """A started rank: its process and the channel to it."""

    number: int
    process: "subprocess.Popen[bytes]"
    channel: Channel[CommandAnswer]


class Ranks:
    """The other ranks of an engine. With `tensor_parallel_size` 1 there are none, and all methods do nothing."""

    def __init__(self, config: EngineConfig, on_lost: OnLost) -> None:
        """Start the other ranks, which begin to load. `on_lost` is called at most once, from another thread."""
        self.shard = Shard(0, config.tensor_parallel_size)
        self._maps_memory = not config.disable_custom_all_reduce
        self.group: Collectives = SingleRank()
        self._ranks: list[_Rank] = []
        self._on_lost = on_lost
        self._folder: Path | None = None
        self._is_closing = threading.Event()
        if self.shard.is_whole:
            return
        self._folder = Path(tempfile.mkdtemp(prefix="baton-ranks-"))
        for number in range(1, self.shard.size):
            self._ranks.append(_start(number))
            # The shard begins to load immediately, in parallel with rank 0.
            self._send([self._ranks[-1]], LoadRank(config, number, torch.get_num_threads()))
        # Closing the write end wakes the watcher, which otherwise sleeps until a rank exits.
        self._wake, self._woken = os.pipe()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def join_group(self, device: torch.device) -> None:
        """Form the process group, after this rank has loaded its shard. Raises the error of another rank's loading."""
        if self._folder is None:
            return
        self._collect(LOAD_TIMEOUT_S)
        store = self._folder / "store"
        # Send first: forming the group waits until every rank has joined.
        self.send_command(JoinGroup(str(store)))
        self.group = TorchCollectives(store, self.shard, device, maps_memory=self._maps_memory)
        self._collect(ANSWER_TIMEOUT_S)

    def send_command(self, command: Command) -> None:
        """Send a command to all other ranks without waiting. Raises `ChannelError`."""
        self._send(self._ranks, command)

    def query_ranks(self, command: Command, timeout_s: float = ANSWER_TIMEOUT_S) -> list[int]:
        """Send a command and return the answer of each other rank. Raises `EngineError`."""
        self._send(self._ranks, command)
        return self._collect(timeout_s)

    def wait(self) -> None:
        """Wait until all ranks have answered a command that was sent."""
        self._collect(ANSWER_TIMEOUT_S)

    def build(self, num_blocks: int, descriptor: int | None) -> None:
        """Make the KV cache of the other ranks. `descriptor` is the memory that holds or mirrors all ranks' blocks.

        None means that there is only one rank.
        """
        if descriptor is None:
            return
        self.send_command(BuildCache(num_blocks))
        for rank in self._ranks:
            rank.channel.send_descriptor(descriptor)
        self._collect(ANSWER_TIMEOUT_S)

    def available_bytes(self, own: int, measure: MeasureMemory) -> int:
        """Return the memory for the KV cache that every rank has, in bytes: the minimum over `own` and
        the other ranks.
        """
        return min([own, *self.query_ranks(measure)])

    def capture(self, capture_here: Callable[[], bool]) -> None:
        """Capture graphs on all ranks at the same time. Raises `EngineError` if only some of them succeeded."""
        # At the same time, because capturing runs the collectives, which need every rank.
        self.send_command(CaptureGraphs())
        captured = [int(capture_here()), *self._collect(ANSWER_TIMEOUT_S)]
        if len(set(captured)) > 1:
            raise EngineError("only some ranks could capture graphs; start with --enforce-eager")

    def close(self) -> None:
        """End the other ranks: they exit when their channel is closed, and are killed if they do not."""
        # May be called again after an error during the start.
        if self._is_closing.is_set() or self._folder is None:
            return
        self._is_closing.set()
        for rank in self._ranks:
            rank.channel.close()
        # Ranks that have not joined the group are still loading; nothing has to end by itself there.
        deadline = time.monotonic() + (0.0 if isinstance(self.group, SingleRank) else END_TIMEOUT_S)
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
        # The library may wait for a rank that has exited; this process must not wait with it.
        ending = threading.Thread(target=self.group.close, name="ranks-end", daemon=True)
        ending.start()
        ending.join(END_TIMEOUT_S)
        if ending.is_alive():
            logger.warning("the collective library did not end within %g s", END_TIMEOUT_S)
        os.close(self._woken)  # wakes the watcher
        self._watcher.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """Kill the other ranks without waiting. For a process that ends now; any thread may call it."""
        # The watcher must not report the exits, which would start a regular stop.
        self._is_closing.set()
        for rank in self._ranks:
            rank.process.kill()

    def _send(self, ranks: list[_Rank], command: Command) -> None:
        # Encode once for all ranks.
        frame = ranks[0].channel.encode(command) if ranks else b""
        for rank in ranks:
            rank.channel.send(frame)

    def _collect(self, timeout_s: float) -> list[int]:
        """Receive one answer from each other rank, all within `timeout_s`. Raises `EngineError`."""
        # One deadline for all ranks, which work at the same time.
        deadline = time.monotonic() + timeout_s
        values: list[int] = []
        for rank in self._ranks:
            try:
                answer = rank.channel.receive(max(0.001, deadline - time.monotonic()))
            except ChannelError as exc:
                raise ChannelError(f"rank {rank.number} of {self.shard.size}: {exc}") from exc
            match answer:
                case CommandDone():
                    values.append(answer.value)
                case CommandFailed():
                    raise _ERRORS.get(answer.kind, EngineError)(answer.message)
        return values

    def _watch(self) -> None:
        """Wait until a rank exits or `close` is called; report the exit."""
        poll = select.poll()
        # A pidfd becomes readable when its process exits, and it cannot refer to a new process with the same id.
        descriptors = {os.pidfd_open(rank.process.pid): rank for rank in self._ranks}
        for descriptor in [*descriptors, self._wake]:
            poll.register(descriptor, select.POLLIN | select.POLLHUP)
        ended = [descriptors[fd] for fd, _ in poll.poll() if fd in descriptors]
        for descriptor in [*descriptors, self._wake]:
            os.close(descriptor)
        if ended and not self._is_closing.is_set():
            message = f"rank {ended[0].number} of {self.shard.size} has exited; its error is in the log above"
            logger.error("%s", message)
            # Report first: `abort` makes the engine's thread fail, and the cause must be known by then.
            self._on_lost(message)
            # The engine's thread may wait in a collective for the lost rank: make it return.
            self.group.abort()


def _start(number: int) -> _Rank:
    """Start the process of a rank with one end of a socket pair."""
    ours, its = socket.socketpair()
    # Close this process's copy of the child's end; otherwise the child's exit would not close the connection.
    with its:
        command = module_command("baton_serve.engine.parallel.tp_worker", str(its.fileno()), str(os.getpid()))
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[its.fileno()])
    return _Rank(number, process, Channel(ours, CommandAnswer, send_timeout_s=SEND_TIMEOUT_S))

"""Rank 0's side: starts the other ranks, tells them what to do, hears of their death. One instance lives or dies whole.

Used from the engine's thread; a watcher thread tells of ranks that have ended, since the engine's may be waiting for
the device, which waits for them.
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
ANSWER_TIMEOUT_S = 300.0
SEND_TIMEOUT_S = 30.0
END_TIMEOUT_S = 5.0

OnLost = Callable[[str], None]

_ERRORS: dict[str, type[EngineError]] = {
    "config": ConfigError,
    "model": ModelError,
    "unsupported": UnsupportedModelError,
    "capacity": CapacityError,
}


@dataclass(frozen=True, slots=True)
class _Rank:
    number: int
    process: "subprocess.Popen[bytes]"
    channel: Channel[CommandAnswer]


class Ranks:
    """None but this process where `tensor_parallel_size` is 1: then everything here is for nothing and free."""

    def __init__(self, config: EngineConfig, on_lost: OnLost) -> None:
        """Starts the others, which begin to load. `on_lost` is called at most once, from another thread."""
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
            self._send([self._ranks[-1]], LoadRank(config, number, torch.get_num_threads()))
        self._wake, self._woken = os.pipe()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def join_group(self, device: torch.device) -> None:
        """When this rank has loaded its part. Raises what another rank's loading raised."""
        if self._folder is None:
            return
        self._collect(LOAD_TIMEOUT_S)
        store = self._folder / "store"
        self.send_command(JoinGroup(str(store)))
        self.group = TorchCollectives(store, self.shard, device, maps_memory=self._maps_memory)
        self._collect(ANSWER_TIMEOUT_S)

    def send_command(self, command: Command) -> None:
        """Without waiting. Raises `ChannelError`."""
        self._send(self._ranks, command)

    def query_ranks(self, command: Command, timeout_s: float = ANSWER_TIMEOUT_S) -> list[int]:
        """One value of each other rank. Raises `EngineError`."""
        self._send(self._ranks, command)
        return self._collect(timeout_s)

    def wait(self) -> None:
        """For the answers to a command that was told."""
        self._collect(ANSWER_TIMEOUT_S)

    def build(self, num_blocks: int, descriptor: int | None) -> None:
        """`descriptor` is of the memory in which all ranks' blocks lie, or are mirrored; None: there is one rank."""
        if descriptor is None:
            return
        self.send_command(BuildCache(num_blocks))
        for rank in self._ranks:
            rank.channel.send_descriptor(descriptor)
        self._collect(ANSWER_TIMEOUT_S)

    def available_bytes(self, own: int, measure: MeasureMemory) -> int:
        """What every rank has."""
        return min([own, *self.query_ranks(measure)])

    def capture(self, capture_here: Callable[[], bool]) -> None:
        """All ranks at the same time. Raises `EngineError` where only some could."""
        self.send_command(CaptureGraphs())
        captured = [int(capture_here()), *self._collect(ANSWER_TIMEOUT_S)]
        if len(set(captured)) > 1:
            raise EngineError("only some ranks could capture graphs; start with --enforce-eager")

    def close(self) -> None:
        """They end when their channel does, and otherwise are ended."""
        if self._is_closing.is_set() or self._folder is None:
            return
        self._is_closing.set()
        for rank in self._ranks:
            rank.channel.close()
        # One that has not begun to work has nothing to end in good order.
        deadline = time.monotonic() + (0.0 if isinstance(self.group, SingleRank) else END_TIMEOUT_S)
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
        # A library that waits for something that will not come must not keep this process.
        ending = threading.Thread(target=self.group.close, name="ranks-end", daemon=True)
        ending.start()
        ending.join(END_TIMEOUT_S)
        if ending.is_alive():
            logger.warning("the collective library did not end within %g s", END_TIMEOUT_S)
        os.close(self._woken)
        self._watcher.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, ranks: list[_Rank], command: Command) -> None:
        frame = ranks[0].channel.encode(command) if ranks else b""
        for rank in ranks:
            rank.channel.send(frame)

    def _collect(self, timeout_s: float) -> list[int]:
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
        """Ends with the first rank that does, or with `close`."""
        poll = select.poll()
        descriptors = {os.pidfd_open(rank.process.pid): rank for rank in self._ranks}
        for descriptor in [*descriptors, self._wake]:
            poll.register(descriptor, select.POLLIN | select.POLLHUP)
        ended = [descriptors[fd] for fd, _ in poll.poll() if fd in descriptors]
        for descriptor in [*descriptors, self._wake]:
            os.close(descriptor)
        if ended and not self._is_closing.is_set():
            message = f"rank {ended[0].number} of {self.shard.size} has ended (its last words are in the log)"
            logger.error("%s", message)
            self._on_lost(message)
            self.group.abort()


def _start(number: int) -> _Rank:
    ours, its = socket.socketpair()
    with its:
        command = module_command("baton_serve.engine.parallel.tp_worker", str(its.fileno()), str(os.getpid()))
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[its.fileno()])
    return _Rank(number, process, Channel(ours, CommandAnswer, send_timeout_s=SEND_TIMEOUT_S))

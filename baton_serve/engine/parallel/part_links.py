"""Connects rank 0 with the process of another rank that sends and receives that rank's part of KV blocks.

The engine moves no blocks between processes. A program that does so for the instance runs in each rank's process, in
threads of its own, while the rank's thread executes the commands of rank 0.
"""

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from baton_serve.engine.kv.kv_cache import KVCache


class ExecutedCommands:
    """Counts the commands of rank 0 that a rank has executed. Other threads wait for a command that has written KV
    blocks, or that was the last to use their memory for another request.
    """

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    def reach(self, count: int) -> None:
        """Record that `count` commands have been executed, and call the functions that wait for it. Called in the
        rank's thread, after each command.
        """
        self._count = count
        # Read without the lock: `when` looks at the count again after it has added a function.
        if self._waiting:
            self._call_due()

    def when(self, count: int, then: Callable[[], None]) -> None:
        """Call `then` as soon as `count` commands have been executed: at once, or later in the rank's thread."""
        with self._lock:
            self._waiting.append((count, then))
        self._call_due()

    def _call_due(self) -> None:
        with self._lock:
            due = [then for count, then in self._waiting if count <= self._count]
            self._waiting = [waiting for waiting in self._waiting if waiting[0] > self._count]
        for then in due:
            then()


@dataclass(frozen=True, slots=True)
class OwnPart:
    """A rank's part of the KV cache, and the count of executed commands."""

    cache: KVCache
    commands: ExecutedCommands


ServePart = Callable[[socket.socket, OwnPart], None]
"""Starts to serve the transfers of a rank's part in threads of its own, as rank 0 orders them through the socket, which
it owns. It must not block."""


@dataclass(frozen=True, slots=True)
class PartLink:
    """Rank 0's end of the connection to the transfers of the rank `number`."""

    number: int
    connection: socket.socket
    num_commands: Callable[[], int]
    """Returns how many commands have been sent to the rank. Any thread may call it."""

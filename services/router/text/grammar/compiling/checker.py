"""Asks the compiling process whether a grammar is valid, with a cache, a queue with a limit, and restarts.

Nothing that a grammar does reaches the router: a crash, a limit exceeded and an error are verdicts about that grammar.
A verdict is kept, so that a grammar that was once compiled costs no process again, and neither does a crash.
"""

import asyncio
import hashlib
import json
import os
import signal
import socket
import subprocess
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from baton_serve.child_command import module_command
from baton_serve.services.common.lifecycle import RestartPolicy
from baton_serve.services.router.protocol.errors import RateLimitError, UnavailableError
from baton_serve.services.router.text.grammar.compiling.process import ENDED, VERDICT, CompileLimits

KEPT_VERDICTS = 4_096
_MODULE = "baton_serve.services.router.text.grammar.compiling.process"
_ATTEMPTS = 3
_RETRY_S = 0.05
_READ_BYTES = 1 << 16
_ANSWER_S = 30.0
"""A job's time from its start to its answer, the start of the process included. Its own limits end it before."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """`max_running` grammars are compiled at a time, `max_waiting` more wait. Further ones are refused."""

    max_running: int = 2
    max_waiting: int = 32


class _LostError(Exception):
    """The compiling process ended before it answered."""


@dataclass(frozen=True, slots=True)
class _Process:
    child: "subprocess.Popen[bytes]"
    control: socket.socket
    started_at: float
    end: "weakref.finalize[[subprocess.Popen[bytes], socket.socket], GrammarChecker]"


class GrammarChecker:
    """Of one tokenizer. Used from one event loop at a time; `close` ends its process, as does the end of the router."""

    def __init__(
        self,
        tokenizer: Callable[[], tuple[str, int | None]],
        *,
        limits: CompileLimits | None = None,
        queue: QueueLimits | None = None,
    ) -> None:
        """`tokenizer` returns the text of tokenizer.json and the token that ends a sequence."""
        self._tokenizer = tokenizer
        self._source: tuple[int, int | None] | None = None
        self._limits = limits or CompileLimits()
        self._queue = queue or QueueLimits()
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._asked: dict[bytes, _Shared] = {}
        self._num_running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._process: _Process | None = None
        self._restarts = RestartPolicy()
        self._starts_from = 0.0

    @property
    def pid(self) -> int | None:
        """Of the compiling process, where it runs."""
        return None if self._process is None else self._process.child.pid

    def start(self) -> None:
        """Start the process, which reads the tokenizer meanwhile. Otherwise the first grammar does this."""
        if self._process is None:
            self._process = self._spawn()

    def close(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None

    def known(self, grammar: str) -> str | None:
        """Return the verdict if this grammar has one already."""
        return self._recall(_key(grammar))

    async def verdict(self, grammar: str) -> str:
        """Return what is wrong with the grammar, or nothing. Raises `RateLimitError` when too many wait, and
        `UnavailableError` when the process is lost again and again.

        Requests for the same grammar share one compilation, which is ended when the last of them is cancelled."""
        key = _key(grammar)
        if (known := self._recall(key)) is not None:
            return known
        shared = self._asked.get(key)
        if shared is None:
            shared = self._asked[key] = _Shared(asyncio.ensure_future(self._find(key, grammar)))
        shared.num_waiting += 1
        try:
            return await asyncio.shield(shared.task)
        finally:
            shared.num_waiting -= 1
            if not shared.num_waiting:
                shared.task.cancel()
                if self._asked.get(key) is shared:
                    del self._asked[key]

    def _recall(self, key: bytes) -> str | None:
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
        return self._verdicts.get(key)

    async def _find(self, key: bytes, grammar: str) -> str:
        await self._take_turn()
        try:
            verdict = await self._compile(grammar)
        finally:
            self._pass_turn()
        self._verdicts[key] = verdict
        if len(self._verdicts) > KEPT_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    async def _take_turn(self) -> None:
        if self._num_running < self._queue.max_running:
            self._num_running += 1
            return
        if len(self._waiting) >= self._queue.max_waiting:
            raise RateLimitError(
                f"{len(self._waiting)} grammars and schemas wait to be compiled already; try again later",
                retry_after_s=1.0,
            )
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn  # `_pass_turn` hands its own place on
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_turn()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def _pass_turn(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._num_running -= 1

    async def _compile(self, grammar: str) -> str:
        for _ in range(_ATTEMPTS):
            try:
                async with asyncio.timeout(_ANSWER_S):
                    return self._read(await self._ask(grammar, await self._running()))
            except _LostError:
                await asyncio.sleep(_RETRY_S)
            except TimeoutError:  # it neither answers nor ends: whatever else waits for it asks the next one
                self._lose()
        raise UnavailableError(
            "the process that compiles grammars and schemas was lost; try again", code="no_compiler", retry_after_s=1.0
        )

    async def _ask(self, grammar: str, process: _Process) -> bytes:
        """Raises `_LostError`. A cancellation closes the socket, which ends the compiler."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            try:
                with theirs:
                    socket.send_fds(process.control, [b"g"], [theirs.fileno()])
                await loop.sock_sendall(ours, grammar.encode(errors="replace"))
                ours.shutdown(socket.SHUT_WR)
                parts = bytearray()
                while part := await loop.sock_recv(ours, _READ_BYTES):
                    parts += part
            except OSError as exc:
                raise _LostError from exc
        if not parts:
            raise _LostError
        return bytes(parts)

    def _read(self, answer: bytes) -> str:
        """Raises `_LostError` for a compiler that something else has killed."""
        kind, rest = answer[:1], answer[1:]
        if kind == VERDICT:
            return rest.decode()
        assert kind == ENDED
        match int(rest):
            case signal.SIGKILL | signal.SIGTERM:
                raise _LostError
            case signal.SIGSEGV | signal.SIGBUS:
                return "the grammar or schema is nested too deeply or too complex to be compiled"
            case signal.SIGPROF:
                return f"the grammar or schema takes more than {self._limits.cpu_s:g} s to be compiled"
            case signal.SIGABRT:
                size = self._limits.memory_bytes >> 20
                return f"the grammar or schema needs more than {size} MiB of memory to be compiled"
            case number:
                return f"the grammar or schema cannot be compiled: its compiler ended with status {-number}"

    async def _running(self) -> _Process:
        """The process; a new one where it has died, but not at once after each death."""
        if self._process is not None and self._process.child.poll() is not None:
            self._lose()
        if self._process is None:
            await asyncio.sleep(max(0.0, self._starts_from - time.monotonic()))
        if self._process is None:
            self._process = self._spawn()
        return self._process

    def _lose(self) -> None:
        if self._process is not None:
            now = time.monotonic()
            self._restarts.next_delay_s(lived_s=now - self._process.started_at, has_served=True)
            self._starts_from = now + 0.1 * 2 ** min(self._restarts.short_lives - 1, 6)
            self.close()

    def _spawn(self) -> _Process:
        """From the event loop's thread: a child is ended with the thread that has started it."""
        file, eos = self._source = self._source or self._stored()
        os.lseek(file, 0, os.SEEK_SET)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            limits = json.dumps(asdict(replace(self._limits, eos=eos)))
            fds = (theirs.fileno(), file)
            child = subprocess.Popen(
                module_command(
                    "baton_serve.services.common.die_with_parent", str(os.getpid()), _MODULE, *map(str, fds), limits
                ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=fds,
            )
        return _Process(child, ours, time.monotonic(), weakref.finalize(self, _end, child, ours))

    def _stored(self) -> tuple[int, int | None]:
        """Return a file of the tokenizer, in memory, and the token that ends a sequence."""
        text, eos = self._tokenizer()
        file = os.memfd_create("baton-tokenizer")
        weakref.finalize(self, os.close, file)
        with os.fdopen(file, "wb", closefd=False) as writer:
            writer.write(text.encode())
        return file, eos


@dataclass(slots=True)
class _Shared:
    """One compilation and how many requests wait for it."""

    task: "asyncio.Task[str]"
    num_waiting: int = 0


def _end(child: "subprocess.Popen[bytes]", control: socket.socket) -> None:
    control.close()
    child.kill()
    child.wait()


def _key(grammar: str) -> bytes:
    return hashlib.blake2b(grammar.encode(errors="replace"), digest_size=16).digest()

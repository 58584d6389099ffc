"""Checks a grammar in the compiling process (queue, cache of verdicts, restarts); whether it is valid,
`limited_compiler.py` decides. It has a cache of verdicts, a bounded queue, and restarts the process.

No grammar can harm the router: a crash of its compiler, an exceeded limit and an error all become verdicts about this
grammar. Verdicts are cached, so a grammar is compiled once, even if its compiler crashes.
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
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from baton_serve.child_command import module_command
from baton_serve.services.common.restart_policy import RestartPolicy
from baton_serve.services.router.protocol.errors import UnavailableError
from baton_serve.services.router.text.grammar.compiling.fair_slots import FairSlots, QueueLimits
from baton_serve.services.router.text.grammar.compiling.limited_compiler import (
    COMPILE,
    CONVERT,
    CONVERTED,
    ENDED,
    VERDICT,
    CompileLimits,
)

MAX_CACHED_VERDICTS = 4_096
"""Number of grammars whose verdicts are cached."""

_MODULE = "baton_serve.services.router.text.grammar.compiling.limited_compiler"
_ATTEMPTS = 3
"""How often a grammar is sent to the compiling process if that process is lost meanwhile."""

_RETRY_S = 0.05
"""Delay in seconds before the next attempt."""

_READ_BYTES = 1 << 16
_ANSWER_S = 30.0
"""Longest time in seconds for one attempt, including the start of the process. `CompileLimits` end a compiler earlier,
so this only ends an attempt if the process itself hangs."""


class _LostError(Exception):
    """The compiling process ended, or the compilation of one grammar in it was killed, before an answer came."""


@dataclass(frozen=True, slots=True)
class _Process:
    """The running compiling process: its handle, the socket to it, its start time, and the function that ends it."""

    child: "subprocess.Popen[bytes]"
    control: socket.socket
    started_at: float
    end: "weakref.finalize[[subprocess.Popen[bytes], socket.socket], GrammarChecker]"


class GrammarChecker:
    """Checks grammars and JSON schemas by compiling them for one tokenizer, in a process of its own (the compiling
    process). Use it from one event loop at a time.

    It owns that process, which ends with `close`, with this object or with the router.
    """

    def __init__(
        self,
        tokenizer: Callable[[], tuple[str, int | None]],
        *,
        limits: CompileLimits | None = None,
        queue: QueueLimits | None = None,
    ) -> None:
        """Create the checker without starting the process. `tokenizer` returns the text of tokenizer.json and the id of
        the end-of-sequence token; it is called only once. `limits` bound one compilation, `queue` the number of
        grammars that wait.
        """
        self._tokenizer = tokenizer
        self._source: tuple[int, int | None] | None = None
        self._limits = limits or CompileLimits()
        self._slots = FairSlots(queue or QueueLimits())
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._compilations: dict[bytes, _Compilation] = {}
        self._process: _Process | None = None
        self._restarts = RestartPolicy()
        self._next_start_at = 0.0

    @property
    def pid(self) -> int | None:
        """The process id of the compiling process, or None if it does not run."""
        return None if self._process is None else self._process.child.pid

    def start(self) -> None:
        """Start the compiling process now, so that it has loaded the tokenizer before the first grammar comes."""
        if self._process is None:
            self._process = self._spawn()

    def close(self) -> None:
        """End the compiling process. A grammar that comes later starts a new one."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def known(self, grammar: str) -> str | None:
        """Return what `verdict` would return for a grammar that was checked before, or None if it was not checked or is
        forgotten.
        """
        return self._cached(_key(grammar))

    async def verdict(self, grammar: str, caller: str = "") -> str:
        """Compile a grammar and return the error message for the client, which is empty if the grammar is valid.

        `caller` is the name of the API key's owner: in the queue a grammar waits for at most one grammar of each other
        caller.

        Requests for the same grammar share one compilation, which is cancelled with the last of them. Raises
        `RateLimitError` if too many grammars wait, and `UnavailableError` if the compiling process is lost repeatedly.
        """
        key = _key(grammar)
        if (known := self._cached(key)) is not None:
            return known
        compilation = self._compilations.get(key)
        if compilation is None:
            compilation = self._compilations[key] = _Compilation(
                asyncio.ensure_future(self._check(key, grammar, caller))
            )
        compilation.num_waiting += 1
        try:
            # The shield keeps a cancelled request from cancelling the compilation for the others.
            return await asyncio.shield(compilation.task)
        finally:
            compilation.num_waiting -= 1
            if not compilation.num_waiting:
                compilation.task.cancel()
                if self._compilations.get(key) is compilation:
                    del self._compilations[key]

    async def converted(self, gbnf: str, caller: str = "") -> str:
        """Convert a grammar from GBNF (llama.cpp's format) to Lark in the compiling process. Raises `ValueError` if it
        is invalid, and the errors of `verdict`.
        """
        await self._slots.acquire(caller)
        try:
            answer = await self._compile(CONVERT + gbnf.encode(errors="replace"))
        finally:
            self._slots.release()
        text = answer[1:].decode()
        if answer[:1] != CONVERTED:
            raise ValueError(text)
        return text

    def _cached(self, key: bytes) -> str | None:
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
        return self._verdicts.get(key)

    async def _check(self, key: bytes, grammar: str, caller: str) -> str:
        await self._slots.acquire(caller)
        try:
            answer = await self._compile(COMPILE + grammar.encode(errors="replace"))
        finally:
            self._slots.release()
        verdict = answer[1:].decode()
        self._verdicts[key] = verdict
        if len(self._verdicts) > MAX_CACHED_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    async def _compile(self, message: bytes) -> bytes:
        """Send a message to the compiling process and return its answer. If the compilation exceeds a limit of time or
        memory, the answer is an error message for the client.

        Raises `UnavailableError` if the process is lost repeatedly.
        """
        for _ in range(_ATTEMPTS):
            try:
                async with asyncio.timeout(_ANSWER_S):
                    return self._read(await self._exchange(message, await self._running()))
            except _LostError:
                await asyncio.sleep(_RETRY_S)
            except TimeoutError:
                # The process neither answers nor ends. Killing it also makes the other grammars that wait for it retry.
                self._end_process()
        raise UnavailableError(
            f"the process that compiles grammars and schemas ended {_ATTEMPTS} times: try again",
            code="no_compiler",
            retry_after_s=1.0,
        )

    async def _exchange(self, message: bytes, process: _Process) -> bytes:
        """Send a message to the compiling process and return the bytes of its answer. Raises `_LostError` if the
        process ends first.

        If this call is cancelled, its socket is closed, which ends the compilation of this grammar.
        """
        loop = asyncio.get_running_loop()
        local, remote = socket.socketpair()
        with local:
            local.setblocking(False)
            try:
                # The message has one byte because a message without data could not carry a descriptor.
                with remote:
                    socket.send_fds(process.control, [b"g"], [remote.fileno()])
                await loop.sock_sendall(local, message)
                local.shutdown(socket.SHUT_WR)
                parts = bytearray()
                while part := await loop.sock_recv(local, _READ_BYTES):
                    parts += part
            except OSError as exc:
                raise _LostError from exc
        if not parts:
            raise _LostError
        return bytes(parts)

    def _read(self, answer: bytes) -> bytes:
        """Return the answer of the compiling process as it is, or an error message for the client if it says that a
        limit has ended the compilation.

        Raises `_LostError` if the compilation was killed from outside, for example for lack of memory.
        """
        if answer[:1] != ENDED:
            return answer
        return VERDICT + self._explained(int(answer[1:])).encode()

    def _explained(self, number: int) -> str:
        """Return the error message for the number of the signal that ended a compilation. Raises `_LostError` for a
        signal that says nothing about the grammar, such as SIGKILL.
        """
        # `limited_compiler` and the kernel send these signals for exceeded limits. SIGKILL and SIGTERM come from
        # outside, for example from the kernel's OOM killer, and say nothing about the grammar.
        match number:
            case signal.SIGKILL | signal.SIGTERM:
                raise _LostError
            case signal.SIGSEGV | signal.SIGBUS:
                return "the grammar or schema is nested too deeply or too complex to be compiled"
            case signal.SIGPROF:
                return f"the grammar or schema takes more than {self._limits.cpu_s:g} s to be compiled"
            case signal.SIGABRT:  # allocating beyond RLIMIT_AS aborts the process
                size = self._limits.memory_bytes >> 20
                return f"the grammar or schema needs more than {size} MiB of memory to be compiled"
            case _:
                return f"the grammar or schema cannot be compiled: its compiler ended with status {-number}"

    async def _running(self) -> _Process:
        """Return the compiling process. If it has ended, start a new one, with a delay that grows each time that it
        ends early.
        """
        if self._process is not None and self._process.child.poll() is not None:
            self._end_process()
        if self._process is None:
            await asyncio.sleep(max(0.0, self._next_start_at - time.monotonic()))
        # Checked again: another grammar may have started the process during the sleep.
        if self._process is None:
            self._process = self._spawn()
        return self._process

    def _end_process(self) -> None:
        if self._process is not None:
            now = time.monotonic()
            self._restarts.next_delay_s(lived_s=now - self._process.started_at, has_served=True)
            self._next_start_at = now + 0.1 * 2 ** min(self._restarts.short_lives - 1, 6)
            self.close()

    def _spawn(self) -> _Process:
        """Start the compiling process. Call it in the event loop's thread.

        The kernel ends the process together with the thread that started it (PR_SET_PDEATHSIG), so a thread of a pool
        must not do it.
        """
        file, eos = self._source = self._source or self._write_tokenizer()
        os.lseek(file, 0, os.SEEK_SET)
        local, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        local.setblocking(False)
        with remote:
            limits = json.dumps(asdict(replace(self._limits, eos=eos)))
            fds = (remote.fileno(), file)
            child = subprocess.Popen(
                module_command(
                    "baton_serve.services.common.die_with_parent", str(os.getpid()), _MODULE, *map(str, fds), limits
                ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=fds,
            )
        return _Process(child, local, time.monotonic(), weakref.finalize(self, _kill, child, local))

    def _write_tokenizer(self) -> tuple[int, int | None]:
        """Write the tokenizer to a file in memory, which the compiling process reads. Return the file's descriptor and
        the id of the end-of-sequence token.
        """
        text, eos = self._tokenizer()
        file = os.memfd_create("baton-tokenizer")
        weakref.finalize(self, os.close, file)
        with os.fdopen(file, "wb", closefd=False) as writer:
            writer.write(text.encode())
        return file, eos


@dataclass(slots=True)
class _Compilation:
    """One running compilation, and the number of requests that wait for its result."""

    task: "asyncio.Task[str]"
    num_waiting: int = 0


def _kill(child: "subprocess.Popen[bytes]", control: socket.socket) -> None:
    control.close()
    child.kill()
    child.wait()


def _key(grammar: str) -> bytes:
    return hashlib.blake2b(grammar.encode(errors="replace"), digest_size=16).digest()

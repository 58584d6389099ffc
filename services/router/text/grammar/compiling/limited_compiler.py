"""Decides whether a grammar or JSON schema can be compiled, within limits of time and memory: one process for each. The
router's `GrammarChecker` starts it.

    python -m baton_serve.services.router.text.grammar.compiling.limited_compiler CONTROL TOKENIZER LIMITS

CONTROL is the descriptor of a socket over which the router sends one socket for each grammar. TOKENIZER is the
descriptor of a file with the text of a tokenizer.json. LIMITS are `CompileLimits` in JSON. This process loads the
tokenizer once, which takes a second for 100,000 tokens, and never compiles anything itself, so a grammar that crashes
its compiler costs only a fork of some milliseconds. It has a single thread, because a fork copies only the thread that
forks and would leave the locks of others taken. It ends when the router closes CONTROL.

The router writes `COMPILE` and a grammar, or `CONVERT` and a grammar in GBNF, to its socket and then shuts down its
side. The answer is `VERDICT` and the error message in UTF-8 (empty if the grammar is valid), `CONVERTED` and the
grammar in Lark, or `ENDED` and the number of the signal that ended the compiler. Then the stream ends. A stream that
ends without an answer means that this process has died. If the router closes the socket, the compiler ends.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import NoReturn

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from baton_serve.contracts.grammar_bounds import (
    PARSER_LIMITS,
    STACK_BYTES,
    GrammarBoundsError,
    check_gbnf,
    check_grammar,
)

COMPILE, CONVERT = b"c", b"g"
"""First byte of a request. GBNF is converted here too, since the library needs quadratic time for some texts."""

VERDICT, CONVERTED, ENDED = b"v", b"t", b"e"
"""First byte of an answer: an error message follows, a converted grammar, or the number of a signal."""

MAX_VERDICT_CHARS = 2_000
"""Longest error message, in characters."""

_PR_SET_PDEATHSIG = 1
"""Option of prctl(2) that sends a signal to this process when its parent ends."""

_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """Limits for the compilation of one grammar; `eos` is the id of the tokenizer's end-of-sequence token.

    `cpu_s` bounds processor time in seconds, and `wall_s` elapsed time, for a compiler that waits and does not compute.
    `mask_cpu_s` bounds processor time for the mask of the first token: grammars within the bounds need up to 0.5 s, and
    the library's own limit (`initial_lexer_fuel`) allows more than a second on slower machines. `memory_bytes` bounds
    the memory that a compiler may use in addition to that of the process with the tokenizer.
    """

    cpu_s: float = 2.0
    mask_cpu_s: float = 0.8
    wall_s: float = 10.0
    memory_bytes: int = 256 * 1024 * 1024
    stack_bytes: int = STACK_BYTES
    eos: int | None = None


@dataclass(slots=True)
class _Running:
    """A process that compiles one grammar: the socket to the router, and the time (monotonic clock, seconds) at which
    it is killed.
    """

    answers: socket.socket
    deadline: float
    is_late: bool = False


def main() -> None:
    """Run the compiling process: load the tokenizer and compile grammars until the router closes the control socket."""
    control = socket.socket(fileno=int(sys.argv[1]))
    with open(int(sys.argv[2]), encoding="utf-8") as file:
        text = file.read()
    limits = CompileLimits(**json.loads(sys.argv[3]))
    tokens = LLTokenizer(text, eos_token=limits.eos)
    del text
    # A compiler may crash by design, and a core file of each crash would fill the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _Forks(control, tokens, limits).serve()


class _Forks:
    """Starts one process for each grammar (a compiler), waits for its end and kills it at its deadline. It keeps the
    running ones by process id.
    """

    def __init__(self, control: socket.socket, tokens: LLTokenizer, limits: CompileLimits) -> None:
        self._control = control
        self._tokens = tokens
        self._limits = limits
        self._running: dict[int, _Running] = {}
        self._wake, wake = os.pipe()
        for end in (self._wake, wake):
            os.set_blocking(end, False)
        # `select` must return when a compiler ends. The handler does nothing, but without one SIGCHLD would be ignored
        # and nothing would be written to the wake-up descriptor.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        # Ctrl-C in a terminal sends SIGINT to the router and to this process. The router drains its requests first, so
        # this process ends with the router and not with the signal.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def serve(self) -> None:
        """Start a compiler for each grammar that the router sends, until the router closes the control socket."""
        while True:
            now = time.monotonic()
            next_s = min((one.deadline - now for one in self._running.values() if not one.is_late), default=None)
            timeout = None if next_s is None else max(0.0, next_s)
            readable, _, _ = select.select([self._control.fileno(), self._wake], [], [], timeout)
            if self._wake in readable:
                os.read(self._wake, _READ_BYTES)
            self._reap()
            self._end_late()
            if self._control.fileno() in readable and not self._take():
                return

    def _take(self) -> bool:
        message, fds, _, _ = socket.recv_fds(self._control, 1, 1)
        if not message:
            return False
        for fd in fds:
            self._start(socket.socket(fileno=fd))
        return True

    def _start(self, answers: socket.socket) -> None:
        try:
            pid = os.fork()
        except OSError:
            # There is too little memory or there are too many processes. Without an answer the router tries again.
            answers.close()
            return
        if pid == 0:
            # The child must not keep the sockets of other grammars open: the router waits for the end of their streams.
            for other in (self._control, *(one.answers for one in self._running.values())):
                other.close()
            _compile(answers, self._tokens, self._limits)
        self._running[pid] = _Running(answers, time.monotonic() + self._limits.wall_s)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                one = self._running.pop(ended[0])
                status = os.waitstatus_to_exitcode(ended[1])
                # A compiler that exits with 0 has sent its verdict itself.
                if status != 0:
                    number = signal.SIGPROF if one.is_late else -status
                    with contextlib.suppress(OSError):
                        one.answers.send(ENDED + str(int(number)).encode())
                one.answers.close()

    def _end_late(self) -> None:
        now = time.monotonic()
        for pid, one in self._running.items():
            if not one.is_late and one.deadline <= now:
                one.is_late = True
                os.kill(pid, signal.SIGKILL)


def _compile(answers: socket.socket, tokens: LLTokenizer, limits: CompileLimits) -> NoReturn:
    """Read a grammar from the socket `answers`, compile it, send the error message (empty if it is valid) and exit. It
    runs in a process that was forked for this grammar.
    """
    status = 1
    try:
        _prepare(limits)
        message = _read_all(answers)
        _end_with(answers)
        answer = _answer(message[:1].encode(), message[1:], tokens, limits)
        # From now on the router's reading of the answer also raises SIGIO, which must not end this process.
        signal.signal(signal.SIGIO, signal.SIG_IGN)
        answers.sendall(answer)
        status = 0
    except MemoryError:
        # llguidance aborts at the memory limit, and Python raises this error. Report both in the same way.
        os.kill(os.getpid(), signal.SIGABRT)
    finally:
        # `sys.exit` would run the clean-up and flush the buffers of the parent process, which were copied by the fork.
        os._exit(status)


def _answer(kind: bytes, text: str, tokens: LLTokenizer, limits: CompileLimits) -> bytes:
    if kind == COMPILE:
        verdict = error_of(text, tokens, limits.mask_cpu_s)
    else:
        try:
            return CONVERTED + lark_of_gbnf(text).encode()
        except ValueError as exc:
            verdict = str(exc)
    return VERDICT + verdict[:MAX_VERDICT_CHARS].encode(errors="replace")


def lark_of_gbnf(text: str) -> str:
    """Convert a grammar from GBNF (llama.cpp's format) to Lark and return it. Raises `ValueError` if it is invalid or
    too large.
    """
    check_gbnf(text)
    return str(grammar_from("gbnf", text))


def error_of(grammar: str, tokens: LLTokenizer, mask_cpu_s: float) -> str:
    """Compile a grammar and return the error message, which is empty if it is valid. `mask_cpu_s` is the processor time
    in seconds that the mask of the first token may take.
    """
    try:
        check_grammar(grammar)
    except GrammarBoundsError as exc:
        return str(exc)
    limits = LLParserLimits(**PARSER_LIMITS)
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        started_at = time.process_time()
        # A grammar so ambiguous that the first token mask exceeds the parser's limits compiles, but would fail in every
        # instance.
        matcher.compute_bitmask()
        if time.process_time() - started_at > mask_cpu_s:
            return f"the grammar or schema takes more than {mask_cpu_s:g} s for its first token"
    return matcher.get_error() or "the grammar cannot be compiled" if matcher.is_error() else ""


def _prepare(limits: CompileLimits) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Undo what `_Forks` has set up for the signals: the default action of SIGPROF and SIGIO ends the process.
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGPROF, signal.SIGIO, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_WRONLY)
    # The message of a crash would appear in the router's log.
    os.dup2(null, 2)
    _limit(resource.RLIMIT_STACK, limits.stack_bytes)
    # The limit counts all address space, including what was inherited with the tokenizer.
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, used + limits.stack_bytes + limits.memory_bytes)
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)


def _limit(kind: int, size: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))


def _read_all(answers: socket.socket) -> str:
    parts = bytearray()
    while part := answers.recv(_READ_BYTES):
        parts += part
    return parts.decode()


def _end_with(answers: socket.socket) -> None:
    """Let the kernel end this process with the signal SIGIO as soon as the router closes its end of the socket."""
    # Compiling is one call of a library, during which no Python code could notice the disconnect.
    fcntl.fcntl(answers, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(answers, fcntl.F_SETFL, fcntl.fcntl(answers, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(answers, 0)
    # If the router has closed it before O_ASYNC was set, no signal comes. POLLHUP is always reported.
    if poll.poll(0):
        os._exit(1)


if __name__ == "__main__":
    main()

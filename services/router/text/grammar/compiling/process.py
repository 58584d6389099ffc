"""`python -m baton_serve.services.router.text.grammar.compiling.process CONTROL TOKENIZER LIMITS`.

Forks a process for each grammar.

CONTROL is a socket that brings one socket for each grammar; TOKENIZER is a file with the text of a tokenizer.json;
LIMITS are `CompileLimits` in JSON. This process reads the tokenizer once, which takes a second for 100,000 tokens, and
never compiles anything itself: so a grammar that crashes its compiler costs one fork of some milliseconds. It has one
thread, so that a fork is safe, and ends when the router closes CONTROL.

Through a grammar's socket come its text and the end of the stream. The answer is `VERDICT` and what is wrong with it in
UTF-8 (nothing, where it is valid), or `ENDED` and the number of the signal that ended its compiler; then the stream
ends. Closing the socket ends the compiler. No answer at all means that this process has died.
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

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from baton_serve.contracts.grammar_bounds import PARSER_LIMITS, STACK_BYTES, GrammarBoundsError, check_grammar

VERDICT, ENDED = b"v", b"e"
MAX_VERDICT_CHARS = 2_000
_PR_SET_PDEATHSIG = 1
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """For one grammar. `cpu_s` is processor time; `wall_s` ends what waits instead of computing. `memory_bytes` is
    address space beyond that of the process with the tokenizer. `eos`: the token that ends a sequence."""

    cpu_s: float = 2.0
    wall_s: float = 10.0
    memory_bytes: int = 256 * 1024 * 1024
    stack_bytes: int = STACK_BYTES
    eos: int | None = None


@dataclass(slots=True)
class _Running:
    answers: socket.socket
    deadline: float
    is_late: bool = False


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    with open(int(sys.argv[2]), encoding="utf-8") as file:
        text = file.read()
    limits = CompileLimits(**json.loads(sys.argv[3]))
    tokens = LLTokenizer(text, eos_token=limits.eos)
    del text
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _Forks(control, tokens, limits).serve()


class _Forks:
    """Owns the compilers that run, by pid."""

    def __init__(self, control: socket.socket, tokens: LLTokenizer, limits: CompileLimits) -> None:
        self._control = control
        self._tokens = tokens
        self._limits = limits
        self._running: dict[int, _Running] = {}
        self._wake, wake = os.pipe()
        for end in (self._wake, wake):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        # Of the router's terminal: this process ends with its router, not with the signal that the router got.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def serve(self) -> None:
        """Until the router closes its end."""
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
        except OSError:  # no memory, or too many processes: no answer, so the router asks again
            answers.close()
            return
        if pid == 0:
            for other in (self._control, *(one.answers for one in self._running.values())):
                other.close()
            _compile(answers, self._tokens, self._limits)
        self._running[pid] = _Running(answers, time.monotonic() + self._limits.wall_s)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                one = self._running.pop(ended[0])
                status = os.waitstatus_to_exitcode(ended[1])
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
    """In the forked process: answers and ends, on every path."""
    status = 1
    try:
        _prepare(limits)
        grammar = _read_all(answers)
        _end_with(answers)
        verdict = error_of(grammar, tokens)
        signal.signal(signal.SIGIO, signal.SIG_IGN)  # of the router, which reads the answer
        answers.sendall(VERDICT + verdict[:MAX_VERDICT_CHARS].encode(errors="replace"))
        status = 0
    except MemoryError:
        os.kill(os.getpid(), signal.SIGABRT)
    finally:
        os._exit(status)


def error_of(grammar: str, tokens: LLTokenizer) -> str:
    """Return what is wrong with a grammar, or nothing. The first mask is made as well: a grammar that is ambiguous
    enough to exceed the parser's limits at once would fail in every worker."""
    try:
        check_grammar(grammar)
    except GrammarBoundsError as exc:
        return str(exc)
    limits = LLParserLimits(**PARSER_LIMITS)
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error() or "the grammar cannot be compiled" if matcher.is_error() else ""


def _prepare(limits: CompileLimits) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGPROF, signal.SIGIO, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # last words of a crash are no line of the router's log
    _limit(resource.RLIMIT_STACK, limits.stack_bytes)
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
    """Let the kernel end this process (SIGIO) as soon as the router has closed its end."""
    fcntl.fcntl(answers, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(answers, fcntl.F_SETFL, fcntl.fcntl(answers, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(answers, 0)
    if poll.poll(0):  # POLLHUP: it has closed it already
        os._exit(1)


if __name__ == "__main__":
    main()

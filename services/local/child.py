"""One process of a local cluster: started, listened to, signalled by pid, its end noticed. Knows no policy."""

import asyncio
import collections
import contextlib
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping

from services.local.console import Console, LineSplitter
from services.local.plan import Process

TAIL_LINES = 15
_READ_BYTES = 65536
_READY = "ready "


class Child:
    """One run of `process`, whose program is `module`. `ended` is set when it is gone and its output has been read."""

    def __init__(
        self,
        process: Process,
        *,
        module: str,
        console: Console,
        environ: Mapping[str, str],
        on_end: Callable[[], None],
    ) -> None:
        self.name = process.name
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self.is_ready = False
        """The process has said on its standard output that it serves."""
        self.ended = asyncio.Event()
        self._console = console
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self.started_at = self._loop.time()
        command = [sys.executable, "-m", "services.local.leash", str(os.getpid()), module, *process.argv]
        out, error = os.pipe(), _terminal() if sys.stderr.isatty() else os.pipe()
        # In a group of its own, so that Ctrl-C reaches the supervisor alone and the order of stopping is ours; in its
        # session, because kernels that share time out among sessions first heed niceness (--engine-nice) within one.
        self._popen = subprocess.Popen(
            command,
            env={**environ, **process.variables},
            stdin=subprocess.DEVNULL,
            stdout=out[1],
            stderr=error[1],
            process_group=0,
        )
        os.close(out[1])
        os.close(error[1])
        self._outputs = [_Output(out[0], self._take_answer), _Output(error[0], self._take_line)]
        self._pidfd = os.pidfd_open(self._popen.pid)
        self._loop.add_reader(self._pidfd, self._exited)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._popen.returncode

    def signal(self, number: int) -> None:
        # The child is not reaped before `_exited`, so its pid cannot be another process's.
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._popen.pid, number)

    def last_line(self) -> str:
        """What it said last: of a process that could not start, why."""
        return next((line for line in reversed(self.tail) if line.strip()), "")

    def how_it_ended(self) -> str:
        status = self._popen.returncode
        if status is None:
            return "still runs"
        return f"status {status}" if status >= 0 else signal.Signals(-status).name

    def _take_line(self, line: str, is_whole: bool) -> None:
        if is_whole:
            self.tail.append(line)
            self._console.line(self.name, line)
        else:
            self._console.moving(self.name, line)

    def _take_answer(self, line: str, is_whole: bool) -> None:
        if line.startswith(_READY):
            self.is_ready = True
        elif is_whole:
            self._take_line(line, True)

    def _exited(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._popen.wait()
        for output in self._outputs:
            output.close()
        self.ended.set()
        self._on_end()


class _Output:
    """One end of a pipe or terminal that a process writes to."""

    def __init__(self, descriptor: int, take: Callable[[str, bool], None]) -> None:
        self._descriptor = descriptor
        self._take = take
        self._splitter = LineSplitter()
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        os.set_blocking(descriptor, False)
        self._loop.add_reader(descriptor, self._read)

    def close(self) -> None:
        """Takes what is there. A grandchild that holds the other end is not waited for."""
        while self._read():
            pass
        if rest := self._splitter.rest():
            self._take(rest, True)
        self._end()

    def _read(self) -> bool:
        if not self._is_open:
            return False
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # EIO: nobody holds the other end of a terminal any more
            data = b""
        for line, is_whole in self._splitter.feed(data.decode(errors="replace")):
            self._take(line, is_whole)
        if not data:
            self._end()
        return bool(data)

    def _end(self) -> None:
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)


def _terminal() -> tuple[int, int]:
    """Both ends of a terminal for a process's progress bars, which leaves its output as it is."""
    ours, its = pty.openpty()
    modes = termios.tcgetattr(its)
    modes[1] &= ~termios.OPOST
    termios.tcsetattr(its, termios.TCSANOW, modes)
    with contextlib.suppress(OSError, termios.error):
        termios.tcsetwinsize(its, termios.tcgetwinsize(sys.stderr.fileno()))
    return ours, its

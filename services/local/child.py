"""One process of a local cluster: started, listened to, signalled by pid, its end noticed. Knows no policy."""

import asyncio
import collections
import contextlib
import os
import pty
import shutil
import signal
import sys
import termios
from collections.abc import Callable, Mapping
from typing import TextIO

from baton_serve.services.local.launches import ProcessLauncher
from baton_serve.services.local.plan import Process


class Console:
    """Lines are aligned behind the longest of `names`, the processes'; without `is_named` they pass as they are."""

    def __init__(self, stream: TextIO, names: list[str], *, is_named: bool = True) -> None:
        self._stream = stream
        self._width = max(map(len, names), default=0)
        self._is_named = is_named
        self._is_interactive = stream.isatty()
        self._has_moving_line = False

    def line(self, name: str, text: str) -> None:
        self._clear()
        self._stream.write(f"{name:<{self._width}} | {text}\n" if self._is_named else f"{text}\n")
        self._stream.flush()

    def moving(self, name: str, text: str) -> None:
        """Replaces the last moving line; nothing without a terminal."""
        if self._is_interactive and text:
            self._clear()
            columns = shutil.get_terminal_size().columns
            self._stream.write(f"{name:<{self._width}} | {text}"[: columns - 1])
            self._stream.flush()
            self._has_moving_line = True

    def _clear(self) -> None:
        if self._has_moving_line:
            self._stream.write("\r\x1b[K")
            self._has_moving_line = False


class LineSplitter:
    r"""Turns pieces of output into lines; what ends with `\r` alone is a moving line (a progress bar)."""

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, text: str) -> list[tuple[str, bool]]:
        r"""Lines with True, moving lines with False. A terminal's `\r\n` is one end of line."""
        pieces = (self._rest + text).replace("\r\n", "\n").replace("\r", "\r\0").replace("\n", "\n\0").split("\0")
        self._rest = pieces.pop()
        return [(piece[:-1], piece.endswith("\n")) for piece in pieces]

    def rest(self) -> str:
        rest, self._rest = self._rest, ""
        return rest


KEPT_OUTPUT_LINES = 15
_READ_BYTES = 65536
_READY = "ready "


class Child:
    """One run of `process`. `ended` is set when it is gone and its output has been read."""

    def __init__(
        self,
        process: Process,
        *,
        launch: ProcessLauncher,
        console: Console,
        environ: Mapping[str, str],
        on_end: Callable[[], None],
    ) -> None:
        self.name = process.name
        self.recent_lines: collections.deque[str] = collections.deque(maxlen=KEPT_OUTPUT_LINES)
        self.is_ready = False
        """The process has said on its standard output that it serves."""
        self.ended = asyncio.Event()
        self.status: int | None = None
        """Exit status, negative for a signal; None while it runs."""
        self._console = console
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self.started_at = self._loop.time()
        out, error = os.pipe(), _terminal() if sys.stderr.isatty() else os.pipe()
        self._launched = launch(process, environ, out[1], error[1])
        os.close(out[1])
        os.close(error[1])
        self._outputs = [_Output(out[0], self._take_answer), _Output(error[0], self._take_line)]
        self._loop.add_reader(self._launched.fileno(), self._exited)

    @property
    def pid(self) -> int:
        return self._launched.pid

    def signal(self, number: int) -> None:
        if self.status is None:
            self._launched.signal(number)

    def last_line(self) -> str:
        """What it said last: of a process that could not start, why."""
        return next((line for line in reversed(self.recent_lines) if line.strip()), "")

    def end_reason(self) -> str:
        if self.status is None:
            return "still runs"
        return f"status {self.status}" if self.status >= 0 else signal.Signals(-self.status).name

    def _take_line(self, line: str, is_whole: bool) -> None:
        if is_whole:
            self.recent_lines.append(line)
            self._console.line(self.name, line)
        else:
            self._console.moving(self.name, line)

    def _take_answer(self, line: str, is_whole: bool) -> None:
        if line.startswith(_READY):
            self.is_ready = True
        elif is_whole:
            self._take_line(line, True)

    def _exited(self) -> None:
        self._loop.remove_reader(self._launched.fileno())
        self.status = self._launched.wait()
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

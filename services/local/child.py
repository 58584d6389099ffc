"""Runs one process of a local cluster: starts it, prints its output, sends it signals and detects its exit.

`cluster_supervisor` decides what to start and restart.
"""

import asyncio
import collections
import contextlib
import os
import pty
import re
import shutil
import sys
import termios
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from baton_serve.services.common.process_lifecycle import EXIT_FAILURE, EXIT_HOPELESS, EXIT_HUNG
from baton_serve.services.local.launches import ProcessLauncher
from baton_serve.services.local.plan import Process


class Console:
    """Prints the output of all processes of a local cluster to one stream, each line behind the name of its process.
    `names` are the names of the processes; the longest one sets the width of the column. Unless `is_named`, lines are
    printed unchanged, because a JSON log must stay parseable.
    """

    def __init__(
        self, stream: TextIO, names: list[str], *, is_named: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._width = max(map(len, names), default=0)
        self._is_named = is_named
        self._is_interactive = stream.isatty()
        self._clock = clock
        self._errors: dict[str, tuple[str, float]] = {}
        """The process that printed each recent error first, and when, by `_error_key`."""
        self._has_moving_line = False

    def line(self, name: str, text: str) -> None:
        """Print one line of the process `name`. If another process has printed the same error before, print only a
        reference to it.
        """
        self._clear()
        if self._is_named and (first := self._first_with(text, name)) != name:
            text = f"the same error as {first}"
        self._stream.write(f"{name:<{self._width}} | {text}\n" if self._is_named else f"{text}\n")
        self._stream.flush()

    def _first_with(self, text: str, name: str) -> str:
        """Return the name of the process that has printed the error in `text` within the last minute; `name` if none
        has, or if the line is not an error.
        """
        if (key := _error_key(text)) is None:
            return name
        now = self._clock()
        self._errors = {key: value for key, value in self._errors.items() if now - value[1] < _SAME_ERROR_S}
        return self._errors.setdefault(key, (name, now))[0]

    def moving(self, name: str, text: str) -> None:
        """Show `text`, a progress bar of the process `name`, in place of the last bar. Do nothing if the stream is not
        a terminal.
        """
        if self._is_interactive and text:
            self._clear()
            # A line that wraps could not be erased: `_clear` reaches only the row of the cursor.
            columns = shutil.get_terminal_size().columns
            self._stream.write(f"{name:<{self._width}} | {text}"[: columns - 1])
            self._stream.flush()
            self._has_moving_line = True

    def _clear(self) -> None:
        if self._has_moving_line:
            self._stream.write("\r\x1b[K")
            self._has_moving_line = False


_SAME_ERROR_S = 60.0
"""Time in which the same error of several processes is printed once: all meet a wrong setting at about this time."""
_ERROR = re.compile(r"\S+ ERROR +\S+ (.*)")
"""A log line of level error: its time, its logger and its text."""
_PROGRAM = re.compile(r"^baton [a-z]+:? ")
"""Start of an error that ends a process, which names its role."""


def without_program(text: str) -> str:
    """Return an error without the name of the program at its start, so that errors of different roles
    can be compared.
    """
    return _PROGRAM.sub("", text)


def _error_key(text: str) -> str | None:
    """Return the part of an error line that is equal for the same error of different processes, or None if the line
    reports no error.
    """
    if found := _ERROR.fullmatch(text):
        # Tracebacks differ in their middle, for example by paths; their ends name the error.
        error = without_program(found[1])
        return error[:80] + error[-160:]
    return without_program(text) if _PROGRAM.match(text) else None


class LineSplitter:
    r"""Divides the output of a process into lines. Text that ends with `\r` alone is a moving line, which the next one
    replaces on a terminal (a progress bar).
    """

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, text: str) -> list[tuple[str, bool]]:
        r"""Add a piece of output, and return the lines that are complete now as pairs: the text, and True, or False for
        a moving line. A terminal's `\r\n` is one end of line.
        """
        # The marker \0 behind each end of line lets one split keep the ends, which say what kind of line it was.
        pieces = (self._rest + text).replace("\r\n", "\n").replace("\r", "\r\0").replace("\n", "\n\0").split("\0")
        self._rest = pieces.pop()
        return [(piece[:-1], piece.endswith("\n")) for piece in pieces]

    def rest(self) -> str:
        """Return the text after the last end of line, and forget it."""
        rest, self._rest = self._rest, ""
        return rest


KEPT_OUTPUT_LINES = 15
"""Last lines of a process that are kept, to be printed again if it keeps failing."""
_READ_BYTES = 65536
_READY = "ready "
"""Start of the line that an instance writes to its standard output once it is ready (`instance.instance_process`)."""


_TIMED_OUT = "Timeout ("
"""Start of the line that `faulthandler` writes when its timer ends a process. Such a process blocks and holds the GIL,
so that it cannot choose its exit status (`services.instance.watchdog`)."""


class Child:
    """One run of a process of a local cluster, from its start to its exit. The supervisor makes a new object for each
    restart.
    """

    def __init__(
        self,
        process: Process,
        *,
        launch: ProcessLauncher,
        console: Console,
        environ: Mapping[str, str],
        holds_error: bool = False,
    ) -> None:
        """Start the process by `launch`. With `holds_error`, an error because of which the process cannot start is not
        printed here: the owner of this object prints it.
        """
        self.name = process.name
        self.recent_lines: collections.deque[str] = collections.deque(maxlen=KEPT_OUTPUT_LINES)
        self.is_ready = False
        """True once the process has reported on its standard output that it is ready."""
        self.status: int | None = None
        """Exit status, negative for a signal; None while it runs."""
        self.is_killed_unready = False
        """True if it was killed because it did not become ready in time."""
        self._has_timed_out = False
        self._holds_error = holds_error
        self._held_error = ""
        self._console = console
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        # Progress bars are drawn only on a terminal, so standard error is one if ours is.
        out, error = os.pipe(), _terminal() if sys.stderr.isatty() else os.pipe()
        self._launched = launch(process, environ, out[1], error[1])
        # The process has its own copies. With ours left open, the pipes would never report an end of file.
        os.close(out[1])
        os.close(error[1])
        self._outputs = [_Output(out[0], self._on_output_line), _Output(error[0], self._on_log_line)]
        self._loop.add_reader(self._launched.fileno(), self._exited)

    @property
    def pid(self) -> int:
        return self._launched.pid

    async def wait(self) -> None:
        """Wait until the process has exited and all its output has been read."""
        await self._ended.wait()

    def signal(self, number: int) -> None:
        """Send the signal `number` to the process. Do nothing if it has exited."""
        if self.status is None:
            self._launched.signal(number)

    def last_line(self) -> str:
        """Return the last line of the process's output that is not blank, or "". If a process could not start, this
        line usually says why.
        """
        return next((line for line in reversed(self.recent_lines) if line.strip()), "")

    @property
    def has_hung(self) -> bool:
        """Return whether the process has ended because it hung, in a step of its engine or during its start."""
        is_ended_by_timer = self._has_timed_out and self.status == EXIT_FAILURE
        return self.status == EXIT_HUNG or is_ended_by_timer or self.is_killed_unready

    def _on_log_line(self, line: str, is_complete: bool) -> None:
        if is_complete:
            self._has_timed_out = self._has_timed_out or line.startswith(_TIMED_OUT)
            self.recent_lines.append(line)
            self._print_held_error()
            if self._holds_error and _PROGRAM.match(line):
                # Only the exit status, which comes later, shows whether this was the last line.
                self._held_error = line
            else:
                self._console.line(self.name, line)
        else:
            self._console.moving(self.name, line)

    def _on_output_line(self, line: str, is_complete: bool) -> None:
        if line.startswith(_READY):
            self.is_ready = True
        elif is_complete:
            self._on_log_line(line, True)

    def _exited(self) -> None:
        self._loop.remove_reader(self._launched.fileno())
        self.status = self._launched.wait()
        for output in self._outputs:
            output.close()
        if self.status != EXIT_HOPELESS:
            self._print_held_error()
        self._ended.set()

    def _print_held_error(self) -> None:
        if self._held_error:
            self._console.line(self.name, self._held_error)
            self._held_error = ""


class _Output:
    """Reads a pipe or terminal that a process writes to, and passes each line to `on_line`, with False for a progress
    bar.
    """

    def __init__(self, descriptor: int, on_line: Callable[[str, bool], None]) -> None:
        self._descriptor = descriptor
        self._on_line = on_line
        self._splitter = LineSplitter()
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        os.set_blocking(descriptor, False)
        self._loop.add_reader(descriptor, self._read)

    def close(self) -> None:
        """Read the output that is there, then close the reading end. Do not wait for the end of the stream.

        A grandchild process may hold the other end open for longer.
        """
        while self._read():
            pass
        if rest := self._splitter.rest():
            self._on_line(rest, True)
        self._end()

    def _read(self) -> bool:
        """Read once from the pipe or terminal. Return whether there was data, so that there may be more."""
        if not self._is_open:
            return False
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            # Linux reports EIO, and not an end of file, once no process has the other end of a terminal open.
            data = b""
        for line, is_complete in self._splitter.feed(data.decode(errors="replace")):
            self._on_line(line, is_complete)
        if not data:
            self._end()
        return bool(data)

    def _end(self) -> None:
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)


def _terminal() -> tuple[int, int]:
    """Return (reading end, writing end) of a new terminal. A process that writes to it draws its progress bars."""
    ours, its = pty.openpty()
    # Without OPOST the terminal passes output on unchanged; with it every \n would become \r\n.
    modes = termios.tcgetattr(its)
    modes[1] &= ~termios.OPOST
    termios.tcsetattr(its, termios.TCSANOW, modes)
    # A progress bar takes its width from its own terminal, which starts with 0 columns.
    with contextlib.suppress(OSError, termios.error):
        termios.tcsetwinsize(its, termios.tcgetwinsize(sys.stderr.fileno()))
    return ours, its

"""One terminal for many processes: whole lines, each named, and below them one line that moves while weights load."""

import shutil
from typing import TextIO


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

"""Memory in which instances that share cores tell whose turn it is (engine/kernels/cpu/src/turns.cpp reads it too).

A file of `MAX_PROCESSES` rows, mapped by every process; a process owns one row for as long as it lives, by a lock
that ends with it. All times are CLOCK_MONOTONIC in ns, so nothing that a dead process left is believed for long.
"""

import ctypes
import fcntl
import mmap
import os
import time

MAX_PROCESSES = 16
WORDS_PER_ROW = 8
"""Words of a row: a cache line."""
COMPUTES_UNTIL, PROMPTS_UNTIL = 0, 1
"""Words: the process has the turn until then; it has prompts to compute until then. 0: it has not."""


class TimeSliceMemoryError(Exception):
    """The memory cannot be used; the message says why."""


class TimeSliceMemory:
    """Mapped while the process lives."""

    def __init__(self, path: str) -> None:
        """Makes the file where it is missing. Raises `TimeSliceMemoryError`."""
        size = MAX_PROCESSES * WORDS_PER_ROW * 8
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if os.fstat(self._file).st_size < size:
                os.ftruncate(self._file, size)
            self._memory = mmap.mmap(self._file, size)
        except (OSError, ValueError) as exc:
            raise TimeSliceMemoryError(f"{path}: {exc}") from exc
        self._words = memoryview(self._memory).cast("q")
        self._row = self._own_row(path)
        self.write(COMPUTES_UNTIL, 0.0)
        self.write(PROMPTS_UNTIL, 0.0)

    @property
    def address(self) -> int:
        """Of the first row, for kernels."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def write(self, word: int, seconds: float) -> None:
        """Into this process's row: from now on for so long, 0 ends it."""
        self._words[self._row * WORDS_PER_ROW + word] = time.monotonic_ns() + int(seconds * 1e9) if seconds else 0

    def is_any(self, word: int) -> bool:
        """Whether it holds for any other process."""
        others = (self._words[row * WORDS_PER_ROW + word] for row in range(MAX_PROCESSES) if row != self._row)
        return max(others) > time.monotonic_ns()

    def _own_row(self, path: str) -> int:
        for row in range(MAX_PROCESSES):
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, row)
            except OSError:
                continue
            return row
        raise TimeSliceMemoryError(f"{path}: {MAX_PROCESSES} processes use it already")

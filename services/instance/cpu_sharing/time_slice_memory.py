"""Shared memory in which instances on the same CPU cores publish when they compute (`--core-turns`).

The file has `MAX_PROCESSES` rows and is mapped by every process; engine/kernels/cpu/src/turns.cpp reads it too. A
process owns one row through a file lock, which the kernel releases when the process ends. All values are
CLOCK_MONOTONIC times in ns in the future, so that a value left by a dead process expires.
"""

import ctypes
import fcntl
import mmap
import os
import time

MAX_PROCESSES = 16
"""Number of rows: the maximum number of processes that share the file."""
WORDS_PER_ROW = 8
"""Number of 8-byte words in a row: one cache line, so that processes do not invalidate each other's rows."""
COMPUTES_UNTIL, PROMPTS_UNTIL = 0, 1
"""Indexes of the words in a row: the end of the step that the process computes, and the time until which it has prompts
to compute, both in ns; 0 if it does not."""


class TimeSliceMemoryError(Exception):
    """The file of `--core-turns`, which instances share, cannot be created, mapped or locked; the message states the
    reason.
    """


class TimeSliceMemory:
    """The file of `--core-turns` in shared memory. Each process on the same CPU cores has one row in it, in which it
    publishes when it computes. This process owns its row until the process ends.
    """

    def __init__(self, path: str) -> None:
        """Open the file at `path` and create it if it is missing.

        Raises `TimeSliceMemoryError` if the file cannot be used or if all of its rows are taken.
        """
        size = MAX_PROCESSES * WORDS_PER_ROW * 8
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if os.fstat(self._file).st_size < size:
                # Only grow the file: other processes may have mapped it already.
                os.ftruncate(self._file, size)
            self._memory = mmap.mmap(self._file, size)
        except (OSError, ValueError) as exc:
            raise TimeSliceMemoryError(f"{path}: {exc}") from exc
        self._words = memoryview(self._memory).cast("q")
        self._row = self._own_row(path)
        # A previous owner of the row may have died within a step.
        self.write(COMPUTES_UNTIL, 0.0)
        self.write(PROMPTS_UNTIL, 0.0)

    @property
    def address(self) -> int:
        """Return the memory address of the first row, from which the CPU kernels (C++) read what other processes
        publish.
        """
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def write(self, word: int, seconds: float) -> None:
        """Set the entry with the index `word` of this process's row to the time `seconds` from now, or clear it if
        `seconds` is 0.
        """
        self._words[self._row * WORDS_PER_ROW + word] = time.monotonic_ns() + int(seconds * 1e9) if seconds else 0

    def is_any(self, word: int) -> bool:
        """Return whether any other process has set the entry with the index `word` of its row to a time that has not
        passed yet.
        """
        others = (self._words[row * WORDS_PER_ROW + word] for row in range(MAX_PROCESSES) if row != self._row)
        return max(others) > time.monotonic_ns()

    def _own_row(self, path: str) -> int:
        """Lock the first row that no other process owns, and return its index. Raises `TimeSliceMemoryError` if all are
        taken.
        """
        for row in range(MAX_PROCESSES):
            try:
                # A lock of one byte per row. POSIX locks belong to the process and end with it, even after SIGKILL, so
                # no row stays taken by a dead process.
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, row)
            except OSError:
                continue
            return row
        raise TimeSliceMemoryError(f"{path}: already used by {MAX_PROCESSES} processes, which is the maximum")

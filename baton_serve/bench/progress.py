"""The progress of a benchmark on stderr, and a bound for its time.

A start with a cold cache of compiled kernels takes a minute, in which a benchmark without such lines seems to hang.
"""

import faulthandler
import sys
import time
from collections.abc import Callable, Iterator
from typing import Self, TextIO


class BenchProgress:
    """Writes a line for each stage of a benchmark, with the seconds since its start.

    As a context manager it ends the process after `max_s` seconds with status 1 and the stacks of all threads, which
    say what did not end.
    """

    def __init__(
        self, name: str, max_s: float, *, clock: Callable[[], float] = time.perf_counter, out: TextIO | None = None
    ) -> None:
        """Start without a line. `name` stands at the beginning of each; `out` is stderr by default."""
        self._name, self._max_s, self._clock = name, max_s, clock
        self._out = out
        self._began_at = clock()
        self._stage = ""

    def __enter__(self) -> Self:
        self.stage(f"begins, and ends after {self._max_s:g} s at the latest (--max-s)")
        # The file under sys.stderr: tests replace that by one without a descriptor.
        faulthandler.dump_traceback_later(self._max_s, file=sys.__stderr__ or 2, exit=True)
        return self

    def __exit__(self, *exc: object) -> None:
        faulthandler.cancel_dump_traceback_later()

    def stage(self, what: str, fraction: float = 0.0) -> None:
        """Write that another stage begins; implements `engine.model.loaded_model.LoadProgress`."""
        if what != self._stage:
            self._stage = what
            (self._out or sys.stderr).write(f"{self._name}: {self._clock() - self._began_at:.1f} s: {what}\n")

    def rounds(self, count: int) -> Iterator[int]:
        """Yield up to `count` numbers of rounds, at least one, and fewer if the next one might not end in time."""
        longest_s = 0.0
        for number in range(count):
            started = self._clock()
            if number and started + 2 * longest_s > self._began_at + self._max_s:
                self.stage(f"ends after {number} of {count} rounds, since a longer time needs a larger --max-s")
                return
            self.stage(f"round {number + 1} of {count}")
            yield number
            longest_s = max(longest_s, self._clock() - started)

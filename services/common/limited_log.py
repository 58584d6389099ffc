"""Logs warnings that a peer can cause, at a limited rate, so that a faulty or hostile peer cannot fill the log."""

import logging
import time
from collections.abc import Callable


class LimitedLog:
    """Logs at most one line in `every_s` seconds. The next line says how many were left out."""

    def __init__(
        self, logger: logging.Logger, *, every_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._every_s = every_s
        self._clock = clock
        self._next_at = float("-inf")
        self._num_left_out = 0

    def warning(self, message: str, *values: object) -> None:
        """Log a warning like `Logger.warning`, or count it as left out."""
        now = self._clock()
        if now < self._next_at:
            self._num_left_out += 1
            return
        if self._num_left_out:
            message += " (%d more such lines since the last one)"
            values += (self._num_left_out,)
        self._next_at, self._num_left_out = now + self._every_s, 0
        self._logger.warning(message, *values)

"""Warnings about what others send, which could come without end."""

import logging
import time
from collections.abc import Callable


class LimitedLog:
    """At most one line in `every_s`; the next one says how many were left out."""

    def __init__(
        self, logger: logging.Logger, *, every_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._every_s = every_s
        self._clock = clock
        self._next_at = float("-inf")
        self._num_left_out = 0

    def warning(self, message: str, *values: object) -> None:
        """As a logger's."""
        now = self._clock()
        if now < self._next_at:
            self._num_left_out += 1
            return
        if self._num_left_out:
            message += " (%d more such lines since the last one)"
            values += (self._num_left_out,)
        self._next_at, self._num_left_out = now + self._every_s, 0
        self._logger.warning(message, *values)

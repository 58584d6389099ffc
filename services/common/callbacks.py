"""Callbacks of several independent receivers: an error of one must not keep the others from being called."""

import logging
from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)


def call_each(what: str, callbacks: Iterable[Callable[[], object]]) -> None:
    """Call all of `callbacks` in order. An exception of one is logged with its traceback, as an error of `what`.

    `asyncio.CancelledError` and other exceptions that end a task or the process are passed on.
    """
    for callback in callbacks:
        try:
            callback()
        except Exception:
            logger.exception("%s has failed", what)

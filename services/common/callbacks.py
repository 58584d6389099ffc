"""Calls several independent callbacks, so that an error of one does not prevent the others from being called."""

import logging
from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)


def call_each(what: str, callbacks: Iterable[Callable[[], object]]) -> None:
    """Call all of `callbacks` in order. Log an exception of a callback with its traceback and the text `what`.

    `asyncio.CancelledError` and other exceptions that end a task or the process are raised.
    """
    for callback in callbacks:
        try:
            callback()
        except Exception:
            # Each callback belongs to another request or component, which must not suffer from this error.
            logger.exception("%s has failed", what)

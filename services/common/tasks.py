"""Tasks that run until somebody ends them."""

import asyncio
from collections.abc import Iterable
from typing import Any

_CANCEL_INTERVAL_S = 0.1


async def cancel_all(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancels them until they have ended, however they do.

    Once is not enough before Python 3.12: `asyncio.wait_for`, within libraries too, forgets a cancellation that comes
    in the turn in which what it waits for is done.
    """
    running = set(tasks)
    while running:
        for task in running:
            task.cancel()
        ended, running = await asyncio.wait(running, timeout=_CANCEL_INTERVAL_S)
        for task in ended:
            if not task.cancelled():
                task.exception()  # told where it happened, or nobody's concern any more

"""Threads for work that would keep the event loop for more than a millisecond: a few for each kind of work.

Kinds do not share threads, so that what takes long in one of them (a slow chat template, an image of 100 megapixels)
delays no other one. The threads are made when they are first needed and end with the process. Texts and bodies have
their own too, in `tokenization` and `parsing`.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Pool:
    """Threads of one kind of work."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what `work` returns; raise what it raises. Work that has not begun is dropped with its caller. Its log
        lines carry the id of the caller's request."""
        return await asyncio.wrap_future(self._threads.submit(copy_context().run, partial(work, *args, **kwargs)))


TEMPLATES = Pool("templates", 2)
GRAMMARS = Pool("grammars", 2)
IMAGES = Pool("images", 4)

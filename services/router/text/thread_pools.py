"""Thread pools for work that would block the event loop for more than a millisecond, one small pool for each kind.

Kinds of work do not share threads, so that slow work of one kind (a slow chat template, an image of 100 megapixels)
does not delay the other kinds. Threads are started at their first use and end with the process. Tokenization and the
parsing of bodies have pools of their own, in `tokenization` and `protocol.request_parsing`.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ThreadPool:
    """A pool of threads for one kind of work, such as formatting answers. Call it from the event loop."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `work` with these arguments in a thread, and return its result or raise its exception.

        If the caller is cancelled before the work has started, the work is dropped.
        """
        # The copied context carries the request id, which the log lines of `work` show.
        return await asyncio.wrap_future(self._threads.submit(copy_context().run, partial(work, *args, **kwargs)))


TEMPLATES = ThreadPool("templates", 2)
"""Renders the chat templates of long chats."""
REQUEST_TEMPLATES = ThreadPool("request-templates", 2)
"""Renders the chat templates that come with requests. One that never ends keeps its thread."""
GRAMMARS = ThreadPool("grammars", 2)
"""Writes the text of grammars; another process compiles them."""
ANSWERS = ThreadPool("answers", 2)
"""Writes whole answers with many logprobs."""
IMAGES = ThreadPool("images", 4)
"""Decodes, reads and checks image files."""
AUDIO = ThreadPool("audio", 4)
"""Waits for the processes that decode audio files."""

"""Compiles grammars of structured output in a worker, on a thread whose native stack is large enough for any that may
arrive.

A matcher must live in the process that computes masks with it, so a worker cannot compile in a child process as the
router does. Three things keep a grammar from crashing a worker. `contracts.grammar_bounds` is checked here again, so
that a worker does not depend on the router's check. The router has compiled the same text with `STACK_BYTES` of stack,
and this thread has four times as much. The parser's limits are the same in both. Only compiling recurses deeply:
computing masks, copying and freeing a matcher need little stack (docs/adr/0015-grammar-compilation.md).
"""

import resource
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from baton_serve.contracts.grammar_bounds import PARSER_LIMITS, WORKER_STACK_BYTES, GrammarBoundsError, check_grammar
from baton_serve.contracts.grammar_errors import explained
from baton_serve.engine.errors import RequestError


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Compiled:
    """A compiled grammar. `num_bytes` is an estimate of its memory: by how much the process grew while it was
    compiled."""

    matcher: LLMatcher
    num_bytes: int


class GrammarCompiler:
    """Owns the thread that compiles grammars, one after another, in the order of the calls."""

    def __init__(self, vocabulary: Callable[[], LLTokenizer]) -> None:
        self._vocabulary = vocabulary
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._has_thread = False

    def compile(self, grammar: str) -> "Future[Compiled]":
        """Start to compile a grammar in this object's thread. The future raises `RequestError` if the grammar is
        invalid."""
        if not self._has_thread:
            # The size of a thread's stack can only be set for all threads that are created next. Create the pool's only
            # thread now, and restore the size immediately.
            before = threading.stack_size(WORKER_STACK_BYTES)
            try:
                self._thread.submit(int).result()  # creates the thread
            finally:
                threading.stack_size(before)
            self._has_thread = True
        return self._thread.submit(self._compile, grammar)

    def close(self) -> None:
        """End the thread, without waiting for a grammar that it is compiling."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str) -> Compiled:
        try:
            check_grammar(grammar)
        except GrammarBoundsError as exc:
            raise RequestError("invalid", f"structured output: {exc}") from exc
        before = _resident_bytes()
        # log_level=0: no output of the library
        matcher = LLMatcher(self._vocabulary(), grammar, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
        # The first mask may take a second, later ones take milliseconds. Computed here, it delays no step:
        # copies of the matcher keep what was computed.
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise RequestError("invalid", f"structured output: {first_line(matcher.get_error())}")
        return Compiled(matcher, max(len(grammar), _resident_bytes() - before))


def first_line(message: str) -> str:
    """Return the first line of an error message of llguidance, in Baton's words. Its other lines point to places in the
    grammar.
    """
    return explained(message.strip().split("\n", 1)[0])


def _resident_bytes() -> int:
    """Return how much physical memory this process uses now, in bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

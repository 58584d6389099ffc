"""Compiles grammars in a worker, on a thread whose native stack is larger than any grammar needs that may arrive.

A matcher must live in the process that makes masks with it, so a worker cannot compile elsewhere as the router does.
Three things keep a grammar from ending a worker: `contracts.grammar_bounds` is checked here again, so that nothing
depends on what a router has checked; the router has compiled the same text with `STACK_BYTES` of stack, and this thread
has four times as much; and the parser's limits are the same here as there. Only compiling recurses: making masks,
copying and freeing a matcher need little stack on any thread (docs/adr/0015-grammar-compilation.md).
"""

import resource
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from baton_serve.contracts.grammar_bounds import PARSER_LIMITS, WORKER_STACK_BYTES, GrammarBoundsError, check_grammar
from baton_serve.engine.errors import RequestError


@dataclass(frozen=True, slots=True)
class Compiled:
    """`num_bytes` is about what the matcher keeps in memory: what the process grew by while it was made."""

    matcher: LLMatcher
    num_bytes: int


class GrammarCompiler:
    """Owns the thread. Grammars are compiled one after the other, in the order in which they were asked for."""

    def __init__(self, vocabulary: Callable[[], LLTokenizer]) -> None:
        self._vocabulary = vocabulary
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._has_thread = False

    def compile(self, grammar: str) -> "Future[Compiled]":
        """Begin; the future raises `RequestError` for a grammar that is wrong."""
        if not self._has_thread:
            before = threading.stack_size(WORKER_STACK_BYTES)
            try:
                self._thread.submit(int).result()  # the thread is made here
            finally:
                threading.stack_size(before)
            self._has_thread = True
        return self._thread.submit(self._compile, grammar)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str) -> Compiled:
        try:
            check_grammar(grammar)
        except GrammarBoundsError as exc:
            raise RequestError("invalid", f"structured output: {exc}") from exc
        before = _resident_bytes()
        matcher = LLMatcher(self._vocabulary(), grammar, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
        if matcher.is_error():
            raise RequestError("invalid", f"structured output: {first_line(matcher.get_error())}")
        return Compiled(matcher, max(len(grammar), _resident_bytes() - before))


def first_line(message: str) -> str:
    """Of an error, without the places in the grammar that follow."""
    return message.strip().split("\n", 1)[0]


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

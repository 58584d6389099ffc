"""Grammars that an answer must follow, by llguidance: which tokens of this model's vocabulary may come next.

A grammar's state is a function of the grammar and the generated tokens, so it can be built anywhere at any time: after
a handoff, a preemption or a replay it is made again by taking the tokens that are there. Used by one thread at a time.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray
from tokenizers import Tokenizer

from baton_serve.engine.errors import RequestError
from baton_serve.engine.sample.grammar_compiler import Compiled, GrammarCompiler, first_line

logger = logging.getLogger(__name__)

Bits = NDArray[np.uint8]
"""Bit j of byte i is token 8i + j."""

MAX_CACHED_GRAMMARS = 256
CACHED_BYTES = 512 * 1024 * 1024
"""Of the grammars that are kept, about; those that sequences follow count as long as they are among them."""


class GrammarState:
    """Where one sequence stands in its grammar. The end of sequence ends the rule: whatever follows it is free."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int]) -> None:
        self.matcher = matcher
        self.is_over = False
        self._eos_token_ids = eos_token_ids
        self._num_accepted = 0

    def take(self, generated: Sequence[int]) -> None:
        """`generated` are all tokens of the sequence after its prompt. Raises `RequestError`."""
        for token in generated[self._num_accepted :]:
            if self.is_over:
                break
            if token in self._eos_token_ids and self.matcher.is_accepting():
                self.is_over = True
            elif not self.matcher.consume_token(token):
                self.check()
                raise RequestError("invalid", f"structured output: token {token} does not follow the grammar")
        self._num_accepted = len(generated)

    def check(self) -> None:
        """Raises `RequestError` when the grammar cannot be followed any more: it grew too complex."""
        if self.matcher.is_error():
            raise RequestError("invalid", f"structured output: {first_line(self.matcher.get_error())}")


class Grammars:
    """Compiles grammars for one model's vocabulary and keeps those used last."""

    def __init__(self, folder: Path, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._compiler = GrammarCompiler(lambda: self.vocabulary)
        self._compiled: OrderedDict[str, Future[Compiled]] = OrderedDict()

    def read(self) -> None:
        """Call at start: it takes a second for 100,000 tokens, and no other thread runs meanwhile."""
        try:
            size = self.vocabulary.vocab_size
        except RequestError as exc:
            logger.info("%s", exc.message)
        else:
            logger.debug("structured output knows %d tokens", size)

    @cached_property
    def vocabulary(self) -> LLTokenizer:
        """Raises `RequestError`."""
        try:
            tokenizer = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        except Exception as exc:  # the library raises nothing narrower
            raise RequestError("invalid", f"structured output needs the model's tokenizer.json: {exc}") from exc
        tokenizer.no_truncation()
        tokenizer.no_padding()
        size = max(self._vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
        if not self._eos_token_ids:
            raise RequestError("invalid", "structured output needs a model that names its end of sequence")
        try:
            return LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=sorted(self._eos_token_ids))
        except ValueError as exc:
            raise RequestError("invalid", f"structured output does not know this tokenizer: {exc}") from exc

    def prepare(self, grammar: str) -> "Future[Compiled]":
        """Compile in the background what will be needed soon. Returns what `start` waits for."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = self._compiler.compile(grammar)
            self._forget_oldest()
        self._compiled.move_to_end(grammar)
        return compiled

    def start(self, grammar: str) -> GrammarState:
        """Before the first token. Waits until the grammar is compiled. Raises `RequestError`."""
        compiled = self.prepare(grammar)
        try:
            return GrammarState(compiled.result().matcher.deep_copy(), self._eos_token_ids)
        except RequestError:
            self._compiled.pop(grammar, None)
            raise

    def close(self) -> None:
        self._compiler.close()

    def _forget_oldest(self) -> None:
        sizes = [one.result().num_bytes if one.done() and not one.exception() else 0 for one in self._compiled.values()]
        total, count = sum(sizes), len(sizes)
        for size in sizes[:-1]:
            if total <= CACHED_BYTES and count <= MAX_CACHED_GRAMMARS:
                break
            self._compiled.popitem(last=False)
            total, count = total - size, count - 1

    def allowed(self, states: Sequence[GrammarState]) -> NDArray[np.uint8]:
        """Bits of the next token for each state [states, bytes], several at once where there are cores."""
        width = (self.vocabulary.vocab_size + 31) // 32 * 4
        bits = np.empty((len(states), width), dtype=np.uint8)
        matchers = [(state.matcher, row) for row, state in enumerate(states)]
        self._executor.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, width, len(states))
        return bits

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()

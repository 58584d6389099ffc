"""Computes which tokens a grammar allows next (structured output, by llguidance), and keeps compiled grammars.

The state of a grammar is a function of the grammar and the generated tokens. So after a handoff, a preemption or a
replay it is built again from the tokens. Used by one thread at a time.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray
from tokenizers import Tokenizer

from baton_serve.engine.errors import RequestError
from baton_serve.engine.sample.grammar_compiler import Compiled, GrammarCompiler, first_line

logger = logging.getLogger(__name__)

Bits = NDArray[np.uint8]
"""A mask of tokens: bit j of byte i is token 8i + j."""

MAX_CACHED_GRAMMARS = 256
"""Largest number of compiled grammars that are kept."""
CACHED_BYTES = 512 * 1024 * 1024
"""Approximate memory of the compiled grammars that are kept, in bytes.

Grammars that sequences use count as long as they are kept here.
"""


class GrammarState:
    """The position of one sequence in its grammar. After the end-of-sequence token, any token is allowed."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int]) -> None:
        self.matcher = matcher
        self.is_over = False
        self._eos_token_ids = eos_token_ids
        self._num_accepted = 0

    def take(self, generated: Sequence[int]) -> None:
        """Advance the grammar to the end of `generated`, which are all tokens of the sequence after the prompt.

        Raises `RequestError` if a token does not follow the grammar.
        """
        for token in generated[self._num_accepted :]:
            if self.is_over:
                break
            # With `ignore_eos`, tokens follow the end of sequence; they are not checked.
            if token in self._eos_token_ids and self.matcher.is_accepting():
                self.is_over = True
            elif not self.matcher.consume_token(token):
                self.check()
                raise RequestError("invalid", f"structured output: token {token} does not follow the grammar")
        self._num_accepted = len(generated)

    def check(self) -> None:
        """Raise `RequestError` if llguidance has failed for this sequence, for example because the grammar became too
        complex."""
        if self.matcher.is_error():
            raise RequestError("invalid", f"structured output: {first_line(self.matcher.get_error())}")


class Grammars:
    """Compiles grammars for the vocabulary of one model, and keeps the most recently used ones for further requests."""

    def __init__(self, folder: Path, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._compiler = GrammarCompiler(lambda: self.vocabulary)
        self._compiled: OrderedDict[str, Future[Compiled]] = OrderedDict()
        # Grammars that were dropped from `_compiled` while requests held them.
        self._held: WeakValueDictionary[str, Compiled] = WeakValueDictionary()

    def read(self) -> None:
        """Read the vocabulary now, at the start of the engine: it takes a second for 100,000 tokens and blocks all
        other threads. If structured output is not possible with this model, log the reason."""
        try:
            size = self.vocabulary.vocab_size
        except RequestError as exc:
            logger.info("%s", exc.message)
        else:
            logger.debug("structured output: read a vocabulary of %d tokens", size)

    @cached_property
    def vocabulary(self) -> LLTokenizer:
        """The model's tokens in the form that llguidance needs to compile grammars, read at the first access.

        Raises `RequestError` if structured output is not possible with this model.
        """
        try:
            tokenizer = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        except Exception as exc:  # the library raises nothing narrower
            raise RequestError("invalid", f"structured output needs the model's tokenizer.json: {exc}") from exc
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # The logits can have more columns than the tokenizer has tokens (padding of the embedding table).
        size = max(self._vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
        if not self._eos_token_ids:
            raise RequestError(
                "invalid", "structured output needs a model with an end-of-sequence token (eos_token_id)"
            )
        try:
            return LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=sorted(self._eos_token_ids))
        except ValueError as exc:
            raise RequestError("invalid", f"structured output does not support this tokenizer: {exc}") from exc

    def prepare(self, grammar: str) -> "Future[Compiled]":
        """Start to compile a grammar in the background, unless it is known already. Return the future of the compiled
        grammar; it raises `RequestError` for an invalid one.

        As long as the caller keeps the future's result, the grammar is not compiled again, whatever other grammars are
        compiled.
        """
        compiled = self._compiled.get(grammar)
        # A failure is not kept: its cause may be temporary.
        if compiled is not None and not (compiled.done() and compiled.exception() is not None):
            self._compiled.move_to_end(grammar)
            return compiled
        held = self._held.get(grammar)
        if held is None:
            compiled = self._compiler.compile(grammar)
        else:
            compiled = Future()
            compiled.set_result(held)
        self._compiled.pop(grammar, None)
        self._compiled[grammar] = compiled
        self._forget_oldest()
        return compiled

    def start(self, grammar: str) -> GrammarState:
        """Return the position before the first token of a new sequence. This waits until the grammar is compiled.
        Raises `RequestError` if the grammar is invalid."""
        compiled = self.prepare(grammar)
        try:
            return GrammarState(compiled.result().matcher.deep_copy(), self._eos_token_ids)
        except RequestError:
            # Do not keep a failure: the cause may be temporary, and the text would occupy a place.
            self._compiled.pop(grammar, None)
            raise

    def close(self) -> None:
        """End the thread that compiles grammars."""
        self._compiler.close()

    def _forget_oldest(self) -> None:
        """Drop the least recently used compiled grammars until their number and memory are within the limits. The
        newest one is always kept."""
        entries = list(self._compiled.items())
        sizes = [one.result().num_bytes if one.done() and not one.exception() else 0 for _, one in entries]
        total, count = sum(sizes), len(sizes)
        for (grammar, one), size in zip(entries[:-1], sizes, strict=False):
            if total <= CACHED_BYTES and count <= MAX_CACHED_GRAMMARS:
                break
            # Requests wait for a grammar that is being compiled.
            if not one.done():
                continue
            del self._compiled[grammar]
            total, count = total - size, count - 1
            if not one.exception():
                self._held[grammar] = one.result()

    def allowed(self, states: Sequence[GrammarState]) -> NDArray[np.uint8]:
        """Return the tokens that each grammar allows next, as bit masks uint8 [states, bytes]. The masks are computed
        in parallel."""
        width = (self.vocabulary.vocab_size + 31) // 32 * 4  # llguidance writes masks in words of 32 bits
        bits = np.empty((len(states), width), dtype=np.uint8)
        matchers = [(state.matcher, row) for row, state in enumerate(states)]
        # "Unsafe" because the library trusts the pointer: `bits` must have exactly this size and stay alive during the
        # call.
        self._executor.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, width, len(states))
        return bits

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()

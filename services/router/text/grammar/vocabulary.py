"""Prepares the model's vocabulary for llguidance: writes grammars for it, and explains the errors of the compiler.

Grammars are compiled in another process (`grammar.compiling`). The instances compile the same text with the same
tokenizer.json, so a grammar that is valid there is valid in the instances too.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from functools import cached_property

from llguidance import LLTokenizer

from baton_serve.contracts.grammar_bounds import GrammarBoundsError, check_grammar
from baton_serve.contracts.grammar_errors import explained
from baton_serve.contracts.lark import Lark, Rule
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.text.tokenization import TextTokenizer

logger = logging.getLogger(__name__)

_POSITION = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
"""Position in the grammar at the beginning of an error of llguidance."""

_EXCERPT = re.compile(r"\s*\d+ \|")
"""Beginning of a line that llguidance quotes from the grammar."""


class Vocabulary:
    """The vocabulary of one model's tokenizer, as the library llguidance needs it to write and check grammars. `write`
    may be called from several threads.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.ends: frozenset[int] = frozenset()
        """Tokens that end an answer, for `Lark`."""
        self._tokenizer = tokenizer

    def write(self, rule: Rule, *, param: str, converted: Mapping[str, str] | None = None) -> str:
        """Return a rule as the text of a grammar; it is not compiled yet. `converted` has the Lark form of each GBNF
        text (llama.cpp's format) in the rule.

        Raises `BadRequestError`, which names `param`, if the grammar is too large or the tokenizer is not supported,
        and `UnconvertedGbnfError` if a GBNF text is missing in `converted`.
        """
        self.read_or_raise()
        lark = Lark(self, converted)
        try:
            grammar = lark.grammar(rule(lark))
            check_grammar(grammar)
        except GrammarBoundsError as exc:
            raise BadRequestError(f"{param}: {exc}", param=param, code="invalid_grammar") from exc
        return grammar

    def check(self, grammar: str, verdict: str, *, param: str) -> None:
        """Raise `BadRequestError`, which names `param`, if `verdict` (the compiler's error message for `grammar`) is
        not empty.
        """
        if verdict:
            reason = _reason(verdict, is_own=grammar.startswith("{"))
            raise BadRequestError(f"{param}: {reason}", param=param, code="invalid_grammar")

    def source(self) -> tuple[str, int | None]:
        """Return the text of tokenizer.json and the id of the end-of-sequence token, from which another process can
        load the tokenizer.
        """
        backend = self._tokenizer.backend
        return backend.to_str(), backend.token_to_id(self._tokenizer.special_tokens.get("eos_token", ""))

    def read_or_raise(self) -> None:
        """Raise `BadRequestError` if llguidance, the library for structured output, does not support the tokenizer."""
        _ = self._tokens

    def read(self) -> None:
        """Convert the vocabulary for llguidance, and log whether that is possible.

        Call it when the router starts: it takes a second for 100,000 tokens and holds the interpreter's lock.
        """
        try:
            size = self._tokens.vocab_size
        except BadRequestError as exc:
            logger.info("%s", exc.message)
        else:
            logger.debug("structured output is ready, the vocabulary has %d tokens", size)

    def pieces(self, text: str) -> Sequence[str | int]:
        """Split a text into the ids of its special tokens and the texts between them, in order."""
        found: list[str | int] = []
        start = 0
        # A batch of one: unlike `encode`, it releases the interpreter's lock, and a text may have 500,000 characters.
        (encoding,) = self._tokenizer.backend.encode_batch([text], add_special_tokens=False)
        for token_id, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if self._tokens.is_special_token(token_id):
                found += [*([text[start:begin]] if text[start:begin] else []), token_id]
                start = end
        return [*found, text[start:]] if text[start:] else found

    @cached_property
    def _tokens(self) -> LLTokenizer:
        text, eos = self.source()
        try:
            return LLTokenizer(text, eos_token=eos)
        except ValueError as exc:
            message = f"structured output is not supported with this model's tokenizer: {exc}"
            raise BadRequestError(message, code="unsupported_parameter") from exc


def _reason(message: str, *, is_own: bool) -> str:
    """Return the compiler's error message in the form for the client, with cause and remedy if they are known.

    Unless the client wrote the text of the grammar (`is_own`), positions and excerpts are removed: they refer to text
    that the router has written and the client has never seen.
    """
    if is_own:
        return explained(message)
    lines: list[str] = []
    is_excerpt = False
    for line in _POSITION.sub("", message).splitlines():
        # After an excerpt comes a line with only a ^ below the error.
        is_marker = is_excerpt and not line.strip(" ^")
        is_excerpt = _EXCERPT.match(line) is not None
        if line.strip() and not is_excerpt and not is_marker:
            lines.append(line.rstrip())
    return explained("\n".join(lines)) or "the grammar cannot be compiled"

"""The model's vocabulary as llguidance needs it: writes grammars against it, and says what a compiler's verdict means.

Nothing is compiled here but in a process of its own (`grammar.compiling`). The instances compile the same text
against the same tokenizer.json; what passes there passes in them.
"""

import logging
import re
from collections.abc import Sequence
from functools import cached_property

from llguidance import LLTokenizer

from baton_serve.contracts.grammar_bounds import GrammarBoundsError, check_grammar
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.text.grammar.lark import Lark, Rule
from baton_serve.services.router.text.tokenization import TextTokenizer

logger = logging.getLogger(__name__)

_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_EXCERPT = re.compile(r"\s*\d+ \|")


class Vocabulary:
    """`write` may be called from several threads."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.ends: frozenset[int] = frozenset()
        """Tokens that end an answer, for `Lark`."""
        self._tokenizer = tokenizer

    def write(self, rule: Rule, *, param: str) -> str:
        """Return the grammar's text, which is within the bounds. Raises `BadRequestError`."""
        self.read_or_raise()
        lark = Lark(self)
        try:
            grammar = lark.grammar(rule(lark))
            check_grammar(grammar)
        except GrammarBoundsError as exc:
            raise BadRequestError(f"{param}: {exc}", param=param, code="invalid_grammar") from exc
        return grammar

    def check(self, grammar: str, verdict: str, *, param: str) -> None:
        """Raise `BadRequestError` where the compiler's verdict is that something is wrong."""
        if verdict:
            reason = _reason(verdict, is_own=grammar.startswith("{"))
            raise BadRequestError(f"{param}: {reason}", param=param, code="invalid_grammar")

    def source(self) -> tuple[str, int | None]:
        """Return the tokenizer as JSON and the token that ends a sequence, for other processes."""
        backend = self._tokenizer.backend
        return backend.to_str(), backend.token_to_id(self._tokenizer.special_tokens.get("eos_token", ""))

    def read_or_raise(self) -> None:
        """Raise `BadRequestError` for a tokenizer that llguidance does not know."""
        _ = self._tokens

    def read(self) -> None:
        """Call at start: it takes a second for 100,000 tokens, and nothing else runs meanwhile."""
        try:
            size = self._tokens.vocab_size
        except BadRequestError as exc:
            logger.info("%s", exc.message)
        else:
            logger.debug("structured output knows %d tokens", size)

    def pieces(self, text: str) -> Sequence[str | int]:
        """For `Lark`."""
        found: list[str | int] = []
        start = 0
        encoding = self._tokenizer.backend.encode(text, add_special_tokens=False)
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
    """`is_own`: the client wrote the grammar's text. Otherwise places and excerpts in it would tell it nothing."""
    if is_own:
        return message.strip()
    lines: list[str] = []
    is_excerpt = False
    for line in _PLACE.sub("", message).splitlines():
        is_marker = is_excerpt and not line.strip(" ^")
        is_excerpt = _EXCERPT.match(line) is not None
        if line.strip() and not is_excerpt and not is_marker:
            lines.append(line.rstrip())
    return "\n".join(lines) or "the grammar cannot be compiled"

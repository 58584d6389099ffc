"""The model's vocabulary as llguidance needs it: compiles grammars, so that a bad one is its client's error alone.

The instances compile the same text against the same tokenizer.json; what passes here passes there.
"""

import logging
import re
from collections.abc import Sequence
from functools import cached_property, lru_cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from services.router.errors import BadRequestError
from services.router.structured.lark import Lark, Rule
from services.router.tokenization import TextTokenizer

logger = logging.getLogger(__name__)

MAX_GRAMMAR_CHARS = 512 * 1024
CHECKED_GRAMMARS = 512

_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_EXCERPT = re.compile(r"\s*\d+ \|")


class Vocabulary:
    """`compile` may be called from several threads."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.ends: frozenset[int] = frozenset()
        """Tokens that end an answer, for `Lark`."""
        self._tokenizer = tokenizer
        self._error_of = lru_cache(maxsize=CHECKED_GRAMMARS)(self._validate)

    def compile(self, rule: Rule, *, param: str) -> str:
        """The grammar's text. Raises `BadRequestError`, which says what is wrong with it."""
        lark = Lark(self)
        grammar = lark.grammar(rule(lark))
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise BadRequestError(f"{param}: a grammar of {len(grammar)} characters is too long", param=param)
        if error := self._error_of(grammar):
            raise BadRequestError(f"{param}: {error}", param=param, code="invalid_grammar")
        return grammar

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
        backend = self._tokenizer.backend
        eos = backend.token_to_id(self._tokenizer.special_tokens.get("eos_token", ""))
        try:
            return LLTokenizer(backend.to_str(), eos_token=eos)
        except ValueError as exc:
            message = f"structured output is not supported with this model's tokenizer: {exc}"
            raise BadRequestError(message, code="unsupported_parameter") from exc

    def _validate(self, grammar: str) -> str:
        """What is wrong with it, if anything is."""
        matcher = LLMatcher(self._tokens, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        return _reason(matcher.get_error(), is_own=grammar.startswith("{")) if matcher.is_error() else ""


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

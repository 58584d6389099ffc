"""Texts, pairs of texts, token ids and chats to what a model that answers with vectors reads: token ids that fit.

A pair goes through the tokenizer as a pair, as cross-encoders were trained; truncation keeps the first tokens and the
special tokens that frame them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from tokenizers import Encoding

from baton_serve.contracts.pooling import PoolingInput
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.text.sampling_params import check_num_tokens
from baton_serve.services.router.text.tokenization import PIECE_CHARS, TextTokenizer, beside_loop

_Text: TypeAlias = str | tuple[str, str]

_GROUP_TEXTS = 256
_CHARS_PER_TEXT = 20
"""A text takes as long to begin with as so many characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRules:
    """`truncate` None refuses what is longer than `max_tokens`; -1 cuts to `max_tokens`."""

    max_tokens: int
    vocab_size: int
    truncate: int | None = None
    add_special_tokens: bool = True
    lowercase: bool = False

    def limit(self) -> int | None:
        """Raises `BadRequestError`."""
        if self.truncate is None:
            return None
        if self.truncate == 0 or self.truncate > self.max_tokens:
            raise BadRequestError(
                f"truncate_prompt_tokens is {self.truncate}; the model takes 1..{self.max_tokens} tokens, -1 for all",
                param="truncate_prompt_tokens",
            )
        return self.max_tokens if self.truncate == -1 else self.truncate


async def of_texts(
    tokenizer: TextTokenizer, texts: Sequence[_Text], rules: InputRules, *, param: str
) -> list[PoolingInput]:
    """Group by group, so that who gives up ends it, and too much ends it before all is done. Raises
    `BadRequestError`."""
    limit = rules.limit()
    inputs: list[PoolingInput] = []
    num_tokens = 0
    for group in groups(texts):
        encode = partial(_encode, tokenizer, group, rules, limit)
        found = await beside_loop(sum(map(_size, group)) + _CHARS_PER_TEXT * len(group), encode)
        _check(found, rules, param, first=len(inputs))
        num_tokens += sum([len(given.token_ids) for given in found])
        check_num_tokens(num_tokens, param=param)
        inputs += found
    return inputs


def groups(texts: Sequence[_Text]) -> Iterator[list[_Text]]:
    """Of at most `PIECE_CHARS` characters each, unless one text has more."""
    group: list[_Text] = []
    size = 0
    for text in texts:
        if group and (size + _size(text) > PIECE_CHARS or len(group) == _GROUP_TEXTS):
            yield group
            group, size = [], 0
        group.append(text)
        size += _size(text)
    if group:
        yield group


def _size(text: _Text) -> int:
    return len(text) if isinstance(text, str) else len(text[0]) + len(text[1])


def of_token_ids(prompts: Sequence[list[int]], rules: InputRules, *, param: str) -> list[PoolingInput]:
    """Raises `BadRequestError`."""
    limit = rules.limit()
    num_tokens = 0
    for token_ids in prompts:
        num_tokens += len(token_ids)
        check_num_tokens(num_tokens, param=param)
        if max(token_ids) >= rules.vocab_size:
            raise BadRequestError(f"{param}: token ids must lie in 0..{rules.vocab_size - 1}", param=param)
    inputs = [PoolingInput(token_ids[:limit]) for token_ids in prompts]
    _check(inputs, rules, param)
    return inputs


def _encode(
    tokenizer: TextTokenizer, texts: Sequence[_Text], rules: InputRules, limit: int | None
) -> list[PoolingInput]:
    if limit is not None:
        return [_input(_cut(tokenizer, text, rules, limit)) for text in texts]
    lowered = [_lowered(text, rules) for text in texts]
    if max(map(_size, lowered)) > PIECE_CHARS:
        for text in lowered:
            _check_size(tokenizer, text, rules)
    encodings = tokenizer.backend.encode_batch_fast(lowered, add_special_tokens=rules.add_special_tokens)
    return [_input(encoding) for encoding in encodings]


def _check_size(tokenizer: TextTokenizer, text: _Text, rules: InputRules) -> None:
    """Raises `BadRequestError` for a text that is far too long, without encoding all of it."""
    for part in (text,) if isinstance(text, str) else text:
        if not tokenizer.has_at_most(part, rules.max_tokens):
            raise BadRequestError(
                f"a text of {len(part)} characters has more than {rules.max_tokens} tokens, which is what the model"
                " takes; shorten it, or give truncate_prompt_tokens (-1 cuts to what fits)",
                code="context_length_exceeded",
            )


def _cut(tokenizer: TextTokenizer, text: _Text, rules: InputRules, limit: int) -> Encoding:
    """The longer text of a pair is cut first, as transformers' `longest_first` does."""
    text = _lowered(text, rules)
    texts = [text] if isinstance(text, str) else list(text)
    parts = [tokenizer.beginning(part, limit) for part in texts]
    backend = tokenizer.backend
    is_pair = len(parts) == 2
    room = limit - (backend.num_special_tokens_to_add(is_pair) if rules.add_special_tokens else 0)
    if room < 0:
        raise BadRequestError(
            f"truncate_prompt_tokens is {limit}, fewer than the special tokens around a text",
            param="truncate_prompt_tokens",
        )
    for part, keep in zip(parts, truncated_lengths([len(part.ids) for part in parts], room), strict=True):
        part.truncate(keep)
    pair = parts[1] if is_pair else None
    return backend.post_process(parts[0], pair, add_special_tokens=rules.add_special_tokens)


def truncated_lengths(lengths: Sequence[int], room: int) -> list[int]:
    """How many tokens of each text fit, taking from the longest; of equal ones, from the last."""
    if sum(lengths) <= room:
        return list(lengths)
    if len(lengths) == 1:
        return [room]
    short = min(lengths)
    if 2 * short <= room:
        kept = room - short
        return [kept, short] if lengths[0] > lengths[1] else [short, kept]
    return [room - room // 2, room // 2]


def _lowered(text: _Text, rules: InputRules) -> _Text:
    if not rules.lowercase:
        return text
    return text.lower() if isinstance(text, str) else (text[0].lower(), text[1].lower())


def _input(encoding: Encoding) -> PoolingInput:
    types = encoding.type_ids
    return PoolingInput(encoding.ids, types if any(types) else None)


def _check(inputs: Sequence[PoolingInput], rules: InputRules, param: str, *, first: int = 0) -> None:
    """`first` is the number of the first one among all inputs of the request."""
    for number, given in enumerate(inputs, first):
        length = len(given.token_ids)
        if length > rules.max_tokens:
            raise BadRequestError(
                f"{param}: number {number} has {length} tokens, but the model takes {rules.max_tokens}; shorten it, or"
                " give truncate_prompt_tokens (-1 cuts to what fits)",
                param=param,
                code="context_length_exceeded",
            )
        if not length:
            raise BadRequestError(f"{param}: number {number} has no tokens", param=param)

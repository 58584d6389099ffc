"""Tokenize and truncate texts, pairs of texts and token ids for a pooling model.

The tokenizer encodes a pair as a pair, as cross-encoders were trained. Truncation keeps the first tokens of each text,
or the last ones, and the special tokens around them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from tokenizers import Encoding

from baton_serve.contracts.pooling import PoolingInput
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.text.prompt_length import check_num_tokens
from baton_serve.services.router.text.tokenization import PIECE_CHARS, TextTokenizer, beside_loop

_Text: TypeAlias = str | tuple[str, str]

_GROUP_TEXTS = 256
"""Largest number of texts that are tokenized together without a pause for other requests."""
_CHARS_PER_TEXT = 20
"""Fixed cost of tokenizing one text, as the number of characters that take the same time. It decides whether a group is
tokenized in a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRules:
    """Says how the inputs of one pooling request are tokenized, how long they may be, and whether longer ones are
    truncated.
    """

    max_tokens: int
    """Largest number of tokens of an input: the context of the model."""
    vocab_size: int
    truncate: int | None = None
    """`truncate_prompt_tokens`: number of tokens to keep; -1 for `max_tokens`, None to reject longer inputs."""
    keeps_end: bool = False
    """True if truncation keeps the last tokens of an input (`truncation_side: left`), False for the first ones."""
    add_special_tokens: bool = True
    lowercase: bool = False

    def limit(self) -> int | None:
        """Return the number of tokens to which longer inputs are cut, or None if they are not cut.

        Raises `BadRequestError` if `truncate` is 0 or exceeds the model's context.
        """
        if self.truncate is None:
            return None
        if self.truncate == 0 or self.truncate > self.max_tokens:
            raise BadRequestError(
                f"truncate_prompt_tokens is {self.truncate}; it must be from 1 to {self.max_tokens}, the model's"
                " context, or -1 for all of it",
                param="truncate_prompt_tokens",
            )
        return self.max_tokens if self.truncate == -1 else self.truncate


async def of_texts(
    tokenizer: TextTokenizer, texts: Sequence[_Text], rules: InputRules, *, param: str
) -> list[PoolingInput]:
    """Tokenize texts or pairs of texts, and return the inputs for the model in the same order.

    Raises `BadRequestError` if one input is too long for the model, or if all together have too many tokens for one
    request. `param` is the field of the request that the error names.
    """
    limit = rules.limit()
    inputs: list[PoolingInput] = []
    num_tokens = 0
    # In groups: a client that disconnects, or too many tokens, ends the work after the present group.
    for group in groups(texts):
        encode = partial(_encode, tokenizer, group, rules, limit)
        group_inputs = await beside_loop(sum(map(_size, group)) + _CHARS_PER_TEXT * len(group), encode)
        _check(group_inputs, rules, param, first=len(inputs))
        num_tokens += sum([len(item.token_ids) for item in group_inputs])
        check_num_tokens(num_tokens, param=param)
        inputs += group_inputs
    return inputs


def groups(texts: Sequence[_Text]) -> Iterator[list[_Text]]:
    """Divide texts into groups of at most `PIECE_CHARS` characters and `_GROUP_TEXTS` texts; each group is tokenized in
    one call. A text is never divided, so that a longer one is a group by itself.
    """
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
    """Return inputs for prompts that are given as token ids, truncated as `rules` say.

    Raises `BadRequestError` for ids outside of the vocabulary, if one input is too long for the model, or if all
    together have too many tokens for one request. `param` is the field of the request that the error names.
    """
    limit = rules.limit()
    num_tokens = 0
    for token_ids in prompts:
        num_tokens += len(token_ids)
        check_num_tokens(num_tokens, param=param)
        # The model has no embedding for such an id: reject it here, not in the engine in the middle of a batch.
        if max(token_ids) >= rules.vocab_size:
            raise BadRequestError(f"{param}: token ids must be from 0 to {rules.vocab_size - 1}", param=param)
    cut = slice(-limit, None) if rules.keeps_end and limit is not None else slice(limit)
    inputs = [PoolingInput(token_ids[cut]) for token_ids in prompts]
    _check(inputs, rules, param)
    return inputs


def _encode(
    tokenizer: TextTokenizer, texts: Sequence[_Text], rules: InputRules, limit: int | None
) -> list[PoolingInput]:
    if limit is not None:
        return [_input(_cut(tokenizer, text, rules, limit)) for text in texts]
    lowered = [_lowered(text, rules) for text in texts]
    # Only a group with one large text can be that long. Check it piece by piece before encoding all of it.
    if max(map(_size, lowered)) > PIECE_CHARS:
        for text in lowered:
            _check_size(tokenizer, text, rules)
    encodings = tokenizer.backend.encode_batch_fast(lowered, add_special_tokens=rules.add_special_tokens)
    return [_input(encoding) for encoding in encodings]


def _check_size(tokenizer: TextTokenizer, text: _Text, rules: InputRules) -> None:
    """Raise `BadRequestError` if a large text (or one of a pair) has more tokens than the model's context. It stops
    tokenizing at that number.
    """
    for part in (text,) if isinstance(text, str) else text:
        if not tokenizer.has_at_most(part, rules.max_tokens):
            raise BadRequestError(
                f"a text of {len(part)} characters has more than {rules.max_tokens} tokens, the model's context;"
                " shorten it, or set truncate_prompt_tokens (-1 cuts it to the context)",
                code="context_length_exceeded",
            )


def _cut(tokenizer: TextTokenizer, text: _Text, rules: InputRules, limit: int) -> Encoding:
    """Encode a text or a pair and cut it to `limit` tokens, special tokens included.

    The longer text of a pair is cut first, as with `longest_first` of transformers. Raises `BadRequestError` if the
    special tokens alone exceed `limit`.
    """
    text = _lowered(text, rules)
    texts = [text] if isinstance(text, str) else list(text)
    # Only the beginning or the end of each text is encoded: the rest would be cut off anyway.
    parts = [tokenizer.part(part, limit, from_end=rules.keeps_end) for part in texts]
    backend = tokenizer.backend
    is_pair = len(parts) == 2
    available = limit - (backend.num_special_tokens_to_add(is_pair) if rules.add_special_tokens else 0)
    if available < 0:
        raise BadRequestError(
            f"truncate_prompt_tokens is {limit}, less than the number of special tokens around a text",
            param="truncate_prompt_tokens",
        )
    for part, keep in zip(parts, truncated_lengths([len(part.ids) for part in parts], available), strict=True):
        part.truncate(keep, direction="left" if rules.keeps_end else "right")
    pair = parts[1] if is_pair else None
    return backend.post_process(parts[0], pair, add_special_tokens=rules.add_special_tokens)


def truncated_lengths(lengths: Sequence[int], room: int) -> list[int]:
    """Return how many tokens to keep of each text so that at most `room` remain together. `lengths` has the numbers of
    tokens of one or two texts.

    Tokens are taken from the longer text; if both have become equally long, from the second one first.
    """
    if sum(lengths) <= room:
        return list(lengths)
    if len(lengths) == 1:
        return [room]
    # The shorter text stays whole if it needs at most half of the room.
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
    # Most models have one type for all tokens. Leaving the types out then makes the message smaller.
    types = encoding.type_ids
    return PoolingInput(encoding.ids, types if any(types) else None)


def _check(inputs: Sequence[PoolingInput], rules: InputRules, param: str, *, first: int = 0) -> None:
    """Raise `BadRequestError` if an input is longer than the model's context or has no token. The error names the field
    `param`.

    `first` is the number of the first of `inputs` among all inputs of the request, for the error.
    """
    for number, item in enumerate(inputs, first):
        length = len(item.token_ids)
        if length > rules.max_tokens:
            raise BadRequestError(
                f"{param}: number {number} has {length} tokens, but the model takes {rules.max_tokens}; shorten it, or"
                " set truncate_prompt_tokens (-1 cuts it to what fits)",
                param=param,
                code="context_length_exceeded",
            )
        if not length:
            raise BadRequestError(f"{param}: number {number} has no tokens", param=param)

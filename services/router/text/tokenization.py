"""Converts text to token ids with tokenizer.json, and decides which special tokens surround a prompt.

It reads tokenizer.json and tokenizer_config.json. Only tokenizer.json decides which special tokens surround a prompt,
as in transformers, which also ignores `add_bos_token` of the config. `chat_template` handles chats, and `detokenizer`
converts streams of tokens to text.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
from tokenizers import AddedToken, Encoding, Tokenizer
from tokenizers.models import BPE

from baton_serve.services.router.protocol.errors import BadRequestError, ModelFolderError

T = TypeVar("T")

ENCODED_INLINE_CHARS = 4_000
"""Longest text that is encoded on the event loop, in characters. Encoding takes 0.26 us a character, so running streams
wait at most a millisecond. Longer texts are encoded in a thread, where the library releases the interpreter's lock."""

PIECE_CHARS = 16 * 1024
"""Size of the pieces in which a long text is counted before it is encoded. The library needs 200 to 700 bytes for each
token, so a text that is far too long must not be encoded as a whole."""

_CUT_TOKENS = 64
"""Bound of the additional tokens that a text gets when it is cut within a word."""

_MAX_CHARS_PER_TOKEN = 256
"""Characters for each wanted token after which the rest of a text is not encoded. Some tokenizers make a single token
of a word of a million characters, and need seconds and 75 bytes for each character to find that out."""

_MIN_MAX_CHARS = 256 * 1024
"""Characters that are encoded in any case: a tokenizer may drop many blanks. They take at most 20 MB and 0.2 s."""

_MORE_CHARS = 1024
"""Characters, in addition to one for each token, with which the search for the first or last tokens of a text starts.
"""

_pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="texts")
"""The threads that encode long texts. Python ends them with the process."""

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that tokenizer_config.json names. Chat templates use them as variables."""

_OTHER_FILES = ("tokenizer.model", "sentencepiece.bpe.model", "spiece.model", "tekken.json", "vocab.json")
"""Files of other tokenizer formats, which are not supported. An error message names the one that is present."""


class _Token(msgspec.Struct, frozen=True):
    """A special token in one of the two forms of tokenizer_config.json: `"</s>"` or `{"content": "</s>", ...}`."""

    content: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False
    special: bool = True


class _Config(msgspec.Struct, frozen=True):
    """The fields that are read from tokenizer_config.json."""

    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    unk_token: str | _Token | None = None
    sep_token: str | _Token | None = None
    pad_token: str | _Token | None = None
    cls_token: str | _Token | None = None
    mask_token: str | _Token | None = None
    added_tokens_decoder: dict[str, _Token] = {}


class TextTokenizer:
    """The tokenizer of one model, loaded once for each process. Its methods may be called from several threads."""

    def __init__(self, tokenizer: Tokenizer, special_tokens: dict[str, str]) -> None:
        self.backend = tokenizer
        self.special_tokens = special_tokens
        """Texts of `bos_token`, `eos_token`, ... that the model defines, by name."""
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @classmethod
    def from_folder(cls, folder: Path) -> "TextTokenizer":
        """Load the tokenizer of a model folder. Raises `ModelFolderError` if a file is missing or broken."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelFolderError(_missing_reason(folder))
        config = read_json(folder / "tokenizer_config.json", _Config) or _Config()
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as exc:  # the library raises nothing narrower
            raise ModelFolderError(f"{file} cannot be read: {exc}") from exc
        # tokenizer.json may have settings of the training, which would cut or pad every prompt.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        named = {name: _text(getattr(config, name)) for name in _NAMED}
        special_tokens = {name: text for name, text in named.items() if text is not None}
        _add_missing_tokens(tokenizer, config, special_tokens)
        return cls(tokenizer, special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text."""
        # Encode a batch of one: unlike the library's `encode`, it releases the interpreter's lock while it works. The
        # `fast` variant does not compute offsets.
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def encode_within(self, text: str, *, add_special_tokens: bool, max_tokens: int) -> list[int] | None:
        """Return the token ids of a text, or None if it certainly has more than `max_tokens` tokens (see
        `has_at_most`).
        """
        if not self.has_at_most(text, max_tokens):
            return None
        return self.encode(text, add_special_tokens=add_special_tokens)

    def has_at_most(self, text: str, max_tokens: int) -> bool:
        """Return False if a text certainly has more than `max_tokens` tokens, or far too many characters for so few.

        The count is approximate: True is also returned for texts up to `PIECE_CHARS`, and for texts with a few tokens
        too many. Memory stays small because the text is encoded in pieces whose tokens are not kept.
        """
        num_tokens = 0
        if len(text) > _max_chars(max_tokens):
            return False
        for start in range(0, len(text) if len(text) > PIECE_CHARS else 0, PIECE_CHARS):
            piece = self.encode(text[start : start + PIECE_CHARS], add_special_tokens=False)
            # Cutting within a word may add tokens. Without this correction a text within the limit could be rejected.
            num_tokens += len(piece) - _CUT_TOKENS
            if num_tokens > max_tokens:
                return False
        return True

    def part(self, text: str, num_tokens: int, *, from_end: bool = False) -> Encoding:
        """Encode the beginning of a long text, or with `from_end` its end, so that the result has at least `num_tokens`
        tokens. Return it with the position of each token in the text.

        It has fewer tokens if the whole text has fewer, or if they are extremely long. Special tokens are not added.
        """
        return self._shortest(text, num_tokens, self._batched, lambda found: len(found.ids), from_end=from_end)

    def encode_part(self, text: str, *, add_special_tokens: bool, num_tokens: int, from_end: bool = True) -> list[int]:
        """Return at least the last `num_tokens` tokens of a text (without `from_end`: the first ones), without encoding
        all of a long text.

        It returns fewer if the whole text has fewer, or if they are extremely long.
        """
        encode = partial(self.encode, add_special_tokens=add_special_tokens)
        return self._shortest(text, num_tokens, encode, len, from_end=from_end)

    def _shortest(
        self, text: str, num_tokens: int, encode: Callable[[str], T], length: Callable[[T], int], *, from_end: bool
    ) -> T:
        """Call `encode` with as little of a text, from its beginning or its end, as gives at least `num_tokens` tokens,
        and return the result. `length` counts the tokens of a result.
        """
        text = _part(text, _max_chars(num_tokens), from_end=from_end)
        num_chars = num_tokens + _MORE_CHARS
        while num_chars < len(text):
            found = encode(_part(text, num_chars, from_end=from_end))
            # The tokens at the cut may differ from those of the whole text, because the cut may be within a word.
            # Require more tokens than the caller uses.
            if length(found) >= num_tokens + _CUT_TOKENS:
                return found
            num_chars *= 2
        return encode(text)

    def _batched(self, text: str) -> Encoding:
        (encoding,) = self.backend.encode_batch([text], add_special_tokens=False)
        return encoding

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each word, without special tokens."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(words), add_special_tokens=False)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a list of token ids."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """Return the token of an id as the vocabulary spells it, or None if the id is unknown."""
        return self.backend.id_to_token(token_id)


class MissingTokenizer(TextTokenizer):
    """Replaces the tokenizer in a router that runs with `--skip-tokenizer-init`.

    It rejects every text, and token ids have no text: clients send and get ids.
    """

    def __init__(self) -> None:
        super().__init__(Tokenizer(BPE()), {})

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Raise `BadRequestError`: this router has no tokenizer, so it cannot encode a text."""
        raise _no_tokenizer()

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Raise `BadRequestError`: this router has no tokenizer, so it cannot encode words."""
        raise _no_tokenizer()

    def part(self, text: str, num_tokens: int, *, from_end: bool = False) -> Encoding:
        """Raise `BadRequestError`: this router has no tokenizer, so it cannot encode a text."""
        raise _no_tokenizer()


def _no_tokenizer() -> BadRequestError:
    return BadRequestError(
        "this server has no tokenizer (--skip-tokenizer-init): send token ids instead of text", code="no_tokenizer"
    )


def _part(text: str, num_chars: int, *, from_end: bool) -> str:
    return text[-num_chars:] if from_end else text[:num_chars]


def _max_chars(num_tokens: int) -> int:
    """Return the largest number of characters of a text that are encoded to find `num_tokens` tokens."""
    return max(_MIN_MAX_CHARS, _MAX_CHARS_PER_TOKEN * num_tokens)


async def beside_loop(num_chars: int, work: Callable[[], T]) -> T:
    """Return the result of `work`. It runs in a thread if `num_chars`, the number of characters that it processes, is
    large, so that the event loop is not blocked.
    """
    if num_chars <= ENCODED_INLINE_CHARS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_pool, work)


def read_json(file: Path, expected: type[T]) -> T | None:
    """Decode a JSON file of a model folder as the type `expected`, or return None if the file does not exist.

    Raises `ModelFolderError` if the file is broken.
    """
    if not file.is_file():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=expected)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ModelFolderError(f"{file} cannot be read: {exc}") from exc


def _missing_reason(folder: Path) -> str:
    if not folder.is_dir():
        return f"model folder {folder} does not exist: check --model and --tokenizer"
    found = [name for name in _OTHER_FILES if (folder / name).is_file()] + [f.name for f in folder.glob("*.tiktoken")]
    if found:
        return (
            f"{folder} has no tokenizer.json, only {found[0]}: convert it once with "
            "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    return f"{folder} has no tokenizer.json: is it the folder of a Hugging Face model?"


def _text(token: str | _Token | None) -> str | None:
    return token.content if isinstance(token, _Token) else token


def _add_missing_tokens(tokenizer: Tokenizer, config: _Config, special_tokens: dict[str, str]) -> None:
    """Add to `tokenizer` the special tokens that tokenizer_config.json names and tokenizer.json lacks, as transformers
    does.
    """
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    # The library gives each new token the next free id, so add them in the order of their ids.
    for _, token in sorted(config.added_tokens_decoder.items(), key=lambda item: int(item[0])):
        if token.content not in known:
            tokenizer.add_tokens([AddedToken(**msgspec.structs.asdict(token))])
            known.add(token.content)
    for text in special_tokens.values():
        if text not in known:
            tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])
            known.add(text)

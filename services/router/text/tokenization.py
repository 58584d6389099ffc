"""Text to token ids, from a Hugging Face folder, without transformers.

Knows tokenizer.json and tokenizer_config.json. Which special tokens frame a prompt is for tokenizer.json alone, as in
transformers: `add_bos_token` in the config is ignored there too. Chats are for `chat_template`, streams of tokens for
`detokenizer`.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
from tokenizers import AddedToken, Encoding, Tokenizer

from baton_serve.services.router.protocol.errors import ModelFolderError

T = TypeVar("T")

ENCODED_INLINE_CHARS = 4_000
"""Longer texts are encoded in a thread, so that running streams do not wait for more than a millisecond: it takes
0.26 us a character, with the interpreter's lock released."""

PIECE_CHARS = 16 * 1024
"""Longer texts are counted piece by piece before they are encoded: the library takes 200 to 700 bytes a token."""

_CUT_TOKENS = 64
"""A word that is cut in two may have more tokens than before; so many more at most."""

_MORE_CHARS = 1024
"""With which the search for the beginning or the end of a text begins, beyond a character for each token."""

_pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="texts")
"""For long texts. Python ends it with the process."""

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OTHER_FILES = ("tokenizer.model", "sentencepiece.bpe.model", "spiece.model", "tekken.json", "vocab.json")


class _Token(msgspec.Struct, frozen=True):
    """A special token as tokenizer_config.json may spell it: `"</s>"` or `{"content": "</s>", ...}`."""

    content: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False
    special: bool = True


class _Config(msgspec.Struct, frozen=True):
    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    unk_token: str | _Token | None = None
    sep_token: str | _Token | None = None
    pad_token: str | _Token | None = None
    cls_token: str | _Token | None = None
    mask_token: str | _Token | None = None
    added_tokens_decoder: dict[str, _Token] = {}


class TextTokenizer:
    """One model's tokenizer. Its methods may be called from several threads."""

    def __init__(self, tokenizer: Tokenizer, special_tokens: dict[str, str]) -> None:
        self.backend = tokenizer
        self.special_tokens = special_tokens
        """Text of `bos_token`, `eos_token`, … as far as the model has them."""
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.longest_token_chars = max((len(token) for token in tokenizer.get_vocab(with_added_tokens=True)), default=1)

    @classmethod
    def from_folder(cls, folder: Path) -> "TextTokenizer":
        """Raises `ModelFolderError`."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelFolderError(_why_not(folder))
        config = read_json(folder / "tokenizer_config.json", _Config) or _Config()
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as exc:  # the library raises nothing narrower
            raise ModelFolderError(f"{file} cannot be read: {exc}") from exc
        tokenizer.no_truncation()
        tokenizer.no_padding()
        named = {name: _text(getattr(config, name)) for name in _NAMED}
        special_tokens = {name: text for name, text in named.items() if text is not None}
        _add_missing_tokens(tokenizer, config, special_tokens)
        return cls(tokenizer, special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # A batch of one: unlike `encode` it releases the interpreter lock while it works.
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def encode_within(self, text: str, *, add_special_tokens: bool, max_tokens: int) -> list[int] | None:
        """None for a text that is far too long: `has_at_most`."""
        if not self.has_at_most(text, max_tokens):
            return None
        return self.encode(text, add_special_tokens=add_special_tokens)

    def has_at_most(self, text: str, max_tokens: int) -> bool:
        """Counted piece by piece, so that no piece's tokens are kept. True for short texts, and for longer ones that
        have a few more."""
        num_tokens = 0
        for start in range(0, len(text) if len(text) > PIECE_CHARS else 0, PIECE_CHARS):
            piece = self.encode(text[start : start + PIECE_CHARS], add_special_tokens=False)
            num_tokens += len(piece) - _CUT_TOKENS
            if num_tokens > max_tokens:
                return False
        return True

    def beginning(self, text: str, num_tokens: int) -> Encoding:
        """`num_tokens` tokens at least, as far as the text has them. No special ones."""
        num_chars = num_tokens + _MORE_CHARS
        while num_chars < len(text):
            found = self._batched(text[:num_chars])
            if len(found.ids) >= num_tokens + _CUT_TOKENS:
                return found
            num_chars *= 2
        return self._batched(text)

    def encode_end(self, text: str, *, add_special_tokens: bool, num_tokens: int) -> list[int]:
        """The last `num_tokens` tokens, and perhaps some before them: not all of a long text is encoded. The first
        tokens of what is may be others than in the whole text, so that many more are asked for."""
        num_chars = num_tokens + _MORE_CHARS
        while num_chars < len(text):
            found = self.encode(text[-num_chars:], add_special_tokens=add_special_tokens)
            if len(found) >= num_tokens + _CUT_TOKENS:
                return found
            num_chars *= 2
        return self.encode(text, add_special_tokens=add_special_tokens)

    def _batched(self, text: str) -> Encoding:
        (encoding,) = self.backend.encode_batch([text], add_special_tokens=False)
        return encoding

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(words), add_special_tokens=False)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        return self.backend.id_to_token(token_id)


async def beside_loop(num_chars: int, work: Callable[[], T]) -> T:
    """`work()`, in a thread where it is for many characters."""
    if num_chars <= ENCODED_INLINE_CHARS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_pool, work)


def read_json(file: Path, expected: type[T]) -> T | None:
    """None when there is no such file. Raises `ModelFolderError`."""
    if not file.is_file():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=expected)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ModelFolderError(f"{file} cannot be read: {exc}") from exc


def _why_not(folder: Path) -> str:
    if not folder.is_dir():
        return f"model folder {folder} does not exist"
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
    """tokenizer_config.json may name tokens that tokenizer.json lacks."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for _, token in sorted(config.added_tokens_decoder.items(), key=lambda item: int(item[0])):
        if token.content not in known:
            tokenizer.add_tokens([AddedToken(**msgspec.structs.asdict(token))])
            known.add(token.content)
    for text in special_tokens.values():
        if text not in known:
            tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])
            known.add(text)

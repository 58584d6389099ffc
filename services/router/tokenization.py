"""Text to token ids, from a Hugging Face folder, without transformers.

Knows tokenizer.json and tokenizer_config.json. Which special tokens frame a prompt is for tokenizer.json alone, as in
transformers: `add_bos_token` in the config is ignored there too. Chats are for `chat_template`, streams of tokens for
`detokenizer`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from tokenizers import AddedToken, Tokenizer

from services.router.errors import ModelFolderError

T = TypeVar("T")

ENCODED_INLINE_CHARS = 4_000
"""Longer texts are encoded in a thread, so that running streams do not wait for more than a millisecond: it takes
0.26 us a character, with the interpreter's lock released."""

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

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        return self.backend.id_to_token(token_id)


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

"""Converts token ids to text while they arrive. The streamed text equals the text of decoding all tokens at once.

A piece of text is returned as soon as no later token can change it, so a multi-byte character is never split. For
byte-level and byte-fallback vocabularies the bytes of each token are looked up in a table, which is checked against the
tokenizers library at start. Any other vocabulary is decoded by the library, with the preceding tokens as context.
"""

import codecs
import json
import re
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

from baton_serve.services.router.text.tokenization import TextTokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"
_UNFINISHED = "unexpected end of data"
"""Python's reason of a `UnicodeDecodeError` for bytes that may become valid with more bytes."""

_CHECKED_IDS = 512
"""Number of tokens, spread over the vocabulary, in each of the two comparisons of the table with the library."""


class TokenStream(Protocol):
    """Converts the tokens of one sequence to text."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Convert the next tokens and return the text that is final now; it may be empty."""
        ...

    def finish(self) -> str:
        """Return the rest of the text: incomplete characters that were held back for further tokens."""
        ...


class Detokenizer:
    """Makes token streams for one tokenizer, and converts single tokens to text. One for each model."""

    def __init__(self, tokenizer: TextTokenizer, *, use_table: bool = True) -> None:
        self._tokenizer = tokenizer
        self._pieces = _Pieces.of(tokenizer) if use_table else None
        # A decoder may have settings that the table does not model. Then the slower library is right by definition.
        if self._pieces is not None and not self._agrees():
            self._pieces = None

    @property
    def uses_table(self) -> bool:
        """True if tokens are converted with the table and not by the library."""
        return self._pieces is not None

    def stream(self, *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True) -> TokenStream:
        """Return a new stream for one sequence."""
        skipped = self._tokenizer.special_ids if skip_special_tokens else frozenset()
        if self._pieces is None:
            joined = frozenset() if spaces_between_special_tokens else self._tokenizer.special_ids
            return _LibraryStream(self._tokenizer.backend, skipped, joined)
        if self._pieces.strips_first_space is None:
            return _ByteLevelStream(self._pieces.pieces, skipped)
        return _ByteFallbackStream(self._pieces, skipped)

    def text(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a whole sequence."""
        stream = self.stream(skip_special_tokens=skip_special_tokens)
        return stream.push(token_ids) + stream.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token in the middle of a text (a leading space is kept)."""
        if self._pieces is not None:
            return self._pieces.pieces[token_id] if token_id < len(self._pieces.pieces) else b""
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """Return the text of a token, with U+FFFD for incomplete characters."""
        return self.token_bytes(token_id).decode(errors="replace")

    def _agrees(self) -> bool:
        """Return whether the table and the library give the same text for samples from the whole vocabulary."""
        size = self._tokenizer.vocab_size
        step = max(1, size // _CHECKED_IDS)
        for ids in (range(0, size, step), range(step // 2, size, step)):
            # Byte tokens are left out: among other tokens they are incomplete characters.
            clean = [i for i in ids if self._tokenizer.token(i) is not None and not _is_byte(self._tokenizer.token(i))]
            expected = self._tokenizer.decode(clean, skip_special_tokens=False)
            if self.text(clean, skip_special_tokens=False) != expected:
                return False
        return True


class _Pieces:
    """The table of the bytes of all tokens, by token id.

    `byte_ids` maps byte tokens such as `<0x0A>` to their value. `strips_first_space` is None for byte-level
    vocabularies; for byte-fallback vocabularies it says whether the first space of a text is removed.
    """

    def __init__(self, pieces: list[bytes], byte_ids: dict[int, int], strips_first_space: bool | None) -> None:
        self.pieces = pieces
        self.byte_ids = byte_ids
        self.strips_first_space = strips_first_space

    @classmethod
    def of(cls, tokenizer: TextTokenizer) -> "_Pieces | None":
        """Return the table of a tokenizer, or None if its decoder is of another kind."""
        steps = _decoder_steps(tokenizer.backend)
        kinds = [step.get("type") for step in steps]
        tokens = [tokenizer.token(i) for i in range(tokenizer.vocab_size)]
        if kinds == ["ByteLevel"]:
            return cls([_byte_level(token) for token in tokens], {}, None)
        # These are the steps of decoders that were converted from SentencePiece (Llama 2, Mistral, Gemma).
        if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or kinds[3:] not in ([], ["Strip"]):
            return None
        old, new = steps[0].get("pattern"), steps[0].get("content")
        if not isinstance(old, dict) or not isinstance(old.get("String"), str) or not isinstance(new, str):
            return None
        if kinds[3:] and (steps[3].get("content"), steps[3].get("start"), steps[3].get("stop")) != (" ", 1, 0):
            return None
        byte_ids = {i: int(m[1], 16) for i, token in enumerate(tokens) if token and (m := _BYTE_TOKEN.fullmatch(token))}
        pieces = [(token or "").replace(old["String"], new).encode() for token in tokens]
        for token_id, value in byte_ids.items():
            pieces[token_id] = bytes([value])
        return cls(pieces, byte_ids, bool(kinds[3:]))


class _ByteLevelStream:
    """Stream for byte-level vocabularies, in which every token is a sequence of bytes."""

    __slots__ = ("_decoder", "_is_within_character", "_pieces", "_skipped")

    def __init__(self, pieces: list[bytes], skipped: frozenset[int]) -> None:
        self._pieces = pieces
        self._skipped = skipped
        self._decoder: codecs.IncrementalDecoder | None = None
        """Incremental UTF-8 decoder, made when a token first ends within a character or is not valid UTF-8."""
        self._is_within_character = False

    def push(self, token_ids: Sequence[int]) -> str:
        pieces, skipped, size = self._pieces, self._skipped, len(self._pieces)
        # Nearly every call has one token, and most tokens are whole characters: both cases have a fast path.
        if len(token_ids) == 1:
            token_id = token_ids[0]
            data = pieces[token_id] if token_id < size and token_id not in skipped else b""
        else:
            data = b"".join([pieces[i] for i in token_ids if i < size and i not in skipped])
        if not self._is_within_character:
            try:
                return data.decode()
            except UnicodeDecodeError:
                self._decoder = self._decoder or _utf8_decoder("replace")
        assert self._decoder is not None
        text = self._decoder.decode(data)
        self._is_within_character = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        return "" if self._decoder is None else self._decoder.decode(b"", final=True)


class _ByteFallbackStream:
    """Stream for vocabularies of text pieces with byte tokens for all other characters (SentencePiece).

    A run of byte tokens becomes text as soon as it is valid UTF-8. A run that never becomes valid is written as one
    U+FFFD for each byte, as the library does.
    """

    def __init__(self, pieces: _Pieces, skipped: frozenset[int]) -> None:
        self._pieces = pieces.pieces
        self._byte_ids = pieces.byte_ids
        self._skipped = skipped
        self._strips = bool(pieces.strips_first_space)
        self._run = bytearray()

    def push(self, token_ids: Sequence[int]) -> str:
        out: list[str] = []
        for token_id in token_ids:
            if token_id in self._skipped or token_id >= len(self._pieces):
                continue
            value = self._byte_ids.get(token_id)
            if value is None:
                # A text piece ends the run of bytes before it: no later token can complete that.
                out.append(self._end_run())
                out.append(self._pieces[token_id].decode())
            else:
                self._run.append(value)
                out.append(self._readable_run())
        return self._strip("".join(out))

    def finish(self) -> str:
        return self._strip(self._end_run())

    def _readable_run(self) -> str:
        try:
            text = self._run.decode()
        except UnicodeDecodeError as exc:
            return "" if exc.reason == _UNFINISHED else self._end_run()
        self._run.clear()
        return text

    def _end_run(self) -> str:
        text = _REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _strip(self, text: str) -> str:
        if self._strips and text:
            self._strips = False
            return text.removeprefix(" ")
        return text


class _LibraryStream:
    """Stream for all other vocabularies. The library decodes a window of tokens, without the new one and with it.

    The difference is the new text. The window begins with the tokens of the previous piece of text, so that the
    library's rules for the beginning of a text do not change the new text. vLLM uses the same method.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], joined: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._joined = joined
        self._was_joined = False
        self._window: list[int] = []
        self._num_read = 0

    def push(self, token_ids: Sequence[int]) -> str:
        out: list[str] = []
        for token_id in token_ids:
            if token_id in self._skipped:
                continue
            # With `spaces_between_special_tokens` false, adjacent special tokens are written without a space.
            is_joined = token_id in self._joined
            self._window.append(token_id)
            text = self._new_text(is_end=False)
            out.append(text.removeprefix(" ") if is_joined and self._was_joined else text)
            self._was_joined = is_joined
        return "".join(out)

    def finish(self) -> str:
        return self._new_text(is_end=True)

    def _new_text(self, *, is_end: bool) -> str:
        before = self._tokenizer.decode(self._window[: self._num_read], skip_special_tokens=False)
        after = self._tokenizer.decode(self._window, skip_special_tokens=False)
        # A replacement character at the end may still become a character with the next token.
        if len(after) <= len(before) or (after.endswith(_REPLACEMENT) and not is_end):
            return ""
        del self._window[: self._num_read]
        self._num_read = len(self._window)
        return after[len(before) :]


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, object]]:
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    return [step for step in steps if isinstance(step, dict)]


def _is_byte(token: str | None) -> bool:
    return token is not None and _BYTE_TOKEN.fullmatch(token) is not None


def _byte_alphabet() -> dict[str, int]:
    """Return the byte for each printable character that represents one in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    table = {chr(value): value for value in printable}
    return table | {chr(256 + i): value for i, value in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level(token: str | None) -> bytes:
    if token is None:
        return b""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        # Added tokens are stored as plain text and may contain characters outside of the table.
        return token.encode()

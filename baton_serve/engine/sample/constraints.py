"""Joins grammar, `allowed_token_ids`, `bad_words`, `min_tokens` and the rules of transcripts into one mask of the
tokens that a row may choose.

It runs on the host, without torch, and depends on the generated tokens only. If min_tokens leaves no token, it is
ignored; if the other rules leave none, the request fails.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np

from baton_serve.contracts.sampling import SamplingSpec
from baton_serve.engine.core.scheduler import SampleRow
from baton_serve.engine.core.sequence import Request
from baton_serve.engine.core.sequence import Sequence as TokenSequence
from baton_serve.engine.errors import RequestError
from baton_serve.engine.sample.grammar import Bits, Grammars, GrammarState
from baton_serve.engine.sample.grammar_compiler import Compiled
from baton_serve.engine.sample.transcripts import TranscriptRules


@dataclass(slots=True)
class Constraints:
    """The token masks of one step, one bit for each token of the vocabulary: 1 if the token is allowed.

    `bits` is [masks, bytes]; row `rows[i]` of the step uses mask `masks[i]`.
    """

    bits: Bits
    rows: list[int] = field(default_factory=list)
    masks: list[int] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    """Rows for which no token can be chosen, with the reason."""


@dataclass(slots=True)
class _SequenceRules:
    """Everything that restricts the tokens of one sequence, such as the state of its grammar, and `allowed_token_ids`
    as a mask."""

    grammar: GrammarState | None
    allowed: Bits | None
    bad_words: "BadWords"
    """Shared by all sequences of a request."""
    transcript: TranscriptRules | None


class ConstraintBuilder:
    """Builds the masks of allowed tokens for each step, from grammars, `allowed_token_ids`, `bad_words`, `min_tokens`
    and the rules of transcripts. Only the mask thread (of `TokenMasker`) calls it."""

    def __init__(self, grammars: Grammars, *, vocab_size: int) -> None:
        self.width = -(-vocab_size // 8)
        self._grammars = grammars
        self._vocab_size = vocab_size
        # Weak: sequences end in many places, and none of them has to notify this class.
        self._known: WeakKeyDictionary[TokenSequence, _SequenceRules] = WeakKeyDictionary()
        self._bad_words: WeakKeyDictionary[Request, BadWords] = WeakKeyDictionary()

    def prepare(self, grammar: str) -> "Future[Compiled]":
        """Start to compile a grammar before its first use, and return the future of the compiled grammar.

        The future raises `RequestError` if the grammar is invalid; a sequence that uses it fails too.
        """
        return self._grammars.prepare(grammar)

    def close(self) -> None:
        """End the thread that compiles grammars."""
        self._grammars.close()

    def build(self, rows: Mapping[int, SampleRow]) -> Constraints:
        """Return the masks of the rows of a step that need one (`is_constrained`). `rows` are these rows, by their
        number in the step. Rows for which no token is allowed are listed in the result's `failed`."""
        failed: dict[int, str] = {}
        sequences: dict[TokenSequence, _SequenceRules] = {}
        for number, row in rows.items():
            try:
                sequences[row.sequence] = self._advanced(row.sequence)
            except RequestError as exc:
                failed[number] = exc.message
        grammar_bits = self._grammar_bits(sequences)
        bits: list[Bits] = []
        mask_of: dict[TokenSequence, int] = {}
        result = Constraints(np.empty((0, self.width), dtype=np.uint8), failed=failed)
        for number, row in rows.items():
            if number in failed:
                continue
            # Rows of one sequence (its first tokens with n > 1) share a mask.
            if row.sequence not in mask_of:
                try:
                    mask = self._mask(row.sequence, sequences[row.sequence], grammar_bits.get(row.sequence))
                except RequestError as exc:
                    failed[number] = exc.message
                    continue
                mask_of[row.sequence] = len(bits)
                bits.append(mask)
            result.rows.append(number)
            result.masks.append(mask_of[row.sequence])
        if bits:
            result.bits = np.stack(bits)
        return result

    def _advanced(self, sequence: TokenSequence) -> _SequenceRules:
        """Return the rules of a sequence, with its grammar advanced to the last generated token.

        Raises `RequestError` if the grammar is invalid or a token does not follow it.
        """
        known = self._known.get(sequence)
        if known is None:
            sampling = sequence.request.work.sampling
            grammar = None if sampling.grammar is None else self._grammars.start(sampling.grammar)
            known = self._known[sequence] = _SequenceRules(
                grammar, self._allowed(sampling), self._words_of(sequence.request), self._transcript(sampling)
            )
        if known.grammar is not None:
            known.grammar.take(_generated(sequence))
        return known

    def _grammar_bits(self, sequences: Mapping[TokenSequence, _SequenceRules]) -> dict[TokenSequence, Bits]:
        """Return for each sequence a bit mask of the tokens that its grammar allows next. The masks are computed in
        parallel.

        Sequences without a grammar, or whose grammar is complete, are left out.
        """
        bound = {s: k.grammar for s, k in sequences.items() if k.grammar is not None and not k.grammar.is_over}
        if not bound:
            return {}
        found = self._grammars.allowed(list(bound.values()))
        bits = np.zeros((len(bound), self.width), dtype=np.uint8)
        # The tokenizer can have more tokens than the logits, or fewer.
        width = min(self.width, found.shape[1])
        bits[:, :width] = found[:, :width]
        return dict(zip(bound, bits, strict=True))

    def _mask(self, sequence: TokenSequence, known: _SequenceRules, grammar: Bits | None) -> Bits:
        """Return the bit mask of the next token of one sequence: `grammar`, the mask of its grammar or None, joined
        with its other rules, which are in `known`. Raises `RequestError` if no token is allowed."""
        if known.grammar is not None and not known.grammar.is_over:
            known.grammar.check()
        mask = np.full(self.width, 255, dtype=np.uint8) if grammar is None else grammar
        if known.allowed is not None:
            mask &= known.allowed
        request = sequence.request
        generated = _generated(sequence)
        if known.transcript is not None:
            mask &= known.transcript.allowed(generated)
        _clear(mask, self._in_vocabulary(known.bad_words.banned(generated)))
        if not mask.any():
            raise RequestError("invalid", f"no token may follow: {_rules(request.work.sampling)} exclude all")
        # Before min_tokens the end of sequence is forbidden, unless the grammar allows nothing else.
        if len(generated) < request.work.sampling.min_tokens:
            longer = mask.copy()
            _clear(longer, self._in_vocabulary(request.end_token_ids))
            mask = longer if longer.any() else mask
        return mask

    def _allowed(self, sampling: SamplingSpec) -> Bits | None:
        """Return the request's `allowed_token_ids` as a bit mask, or None if it has none."""
        if sampling.allowed_token_ids is None:
            return None
        bits = np.zeros(self.width * 8, dtype=np.uint8)
        bits[sampling.allowed_token_ids] = 1
        return np.packbits(bits, bitorder="little")

    def _transcript(self, sampling: SamplingSpec) -> TranscriptRules | None:
        return None if sampling.transcript is None else TranscriptRules(sampling.transcript, self.width)

    def _words_of(self, request: Request) -> "BadWords":
        """Return the bad words of a request. They are prepared only once for each request, because they may have
        262,144 tokens."""
        words = self._bad_words.get(request)
        if words is None:
            words = self._bad_words[request] = BadWords(request.work.sampling.bad_words)
        return words

    def _in_vocabulary(self, tokens: Sequence[int] | frozenset[int]) -> list[int]:
        return [token for token in tokens if 0 <= token < self._vocab_size]


def is_constrained(row: SampleRow) -> bool:
    """Return whether the token of this row must be chosen with a mask: its request has a grammar, `allowed_token_ids`,
    `bad_words` or rules of transcripts, or fewer than `min_tokens` tokens are generated."""
    sampling = row.sequence.request.work.sampling
    return (
        sampling.grammar is not None
        or sampling.allowed_token_ids is not None
        or bool(sampling.bad_words)
        or sampling.transcript is not None
        or row.sequence.num_generated < sampling.min_tokens
    )


class BadWords:
    """The `bad_words` of one request as token sequences. It finds the tokens that would complete one, in a time that
    depends on the lengths of the words but not on their number."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._last_tokens: dict[int, dict[tuple[int, ...], list[int]]] = {}
        """The last tokens of the words, by the tokens before them, and these by their number."""
        for word in words:
            if word:
                before = self._last_tokens.setdefault(len(word) - 1, {})
                before.setdefault(tuple(word[:-1]), []).append(word[-1])

    def banned(self, generated: Sequence[int]) -> list[int]:
        """Return the tokens that must not follow `generated`, because they would complete a bad word."""
        found: list[int] = []
        for length, last_tokens in self._last_tokens.items():
            if length <= len(generated):
                found += last_tokens.get(tuple(generated[len(generated) - length :]), ())
        return found


def _generated(sequence: TokenSequence) -> list[int]:
    return sequence.token_ids[sequence.request.work.num_prompt_tokens :]


def _clear(mask: Bits, tokens: Sequence[int]) -> None:
    for token in tokens:
        mask[token >> 3] &= ~(1 << (token & 7)) & 255


def _rules(sampling: SamplingSpec) -> str:
    """Return the names of the restrictions that a request has, such as "the grammar", for an error message."""
    rules = {
        "the grammar": sampling.grammar is not None,
        "allowed_token_ids": sampling.allowed_token_ids is not None,
        "bad_words": bool(sampling.bad_words),
        "the rules of transcripts": sampling.transcript is not None,
    }
    return " and ".join(name for name, is_set in rules.items() if is_set)

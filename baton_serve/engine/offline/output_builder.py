"""Builds the outputs of the offline API from tokens: detokenization, stop strings, logprobs, finish reasons."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from baton_serve.contracts.messages import TokenLogprobs
from baton_serve.engine.offline.outputs import CompletionOutput, Logprob, Logprobs
from baton_serve.engine.offline.request_params import SamplingParams


class IncrementalTokenizer(Protocol):
    """The method of a transformers tokenizer that `StopSearch` calls."""

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, spaces_between_special_tokens: bool
    ) -> str: ...


class StopMatch(NamedTuple):
    """A stop string that was found (`matched`), and the text of the answer before it; with `include_stop_str_in_output`
    the text includes the stop string."""

    text: str
    matched: str


class StopSearch:
    """Searches the text of one sequence for stop strings while its tokens arrive."""

    def __init__(
        self, stops: Sequence[str], *, include: bool, tokenizer: IncrementalTokenizer, skip_special_tokens: bool
    ) -> None:
        self._stops = stops
        self._include = include
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._text = ""
        self._prefix = self._read = 0
        """Number of ids whose text is in `_text`.

        Decoding starts at id `_prefix`, because the text of a token can depend on the tokens before it.
        """

    def push(self, token_id: int) -> StopMatch | None:
        """Append the next token of the sequence. Return the stop string that begins first in the text, or None if there
        is none yet."""
        self._ids.append(token_id)
        known, grown = self._decode(self._prefix, self._read), self._decode(self._prefix, len(self._ids))
        # An incomplete UTF-8 character decodes to U+FFFD. Wait for the token that completes it.
        if len(grown) <= len(known) or grown.endswith(_BROKEN):
            return None
        # A stop string can begin in the old text, at most its length less one before the new text.
        searched = max(0, len(self._text) - max(map(len, self._stops)) + 1)
        self._text += grown[len(known) :]
        # The tokens of the last piece are decoded again with the next ones: a tokenizer may join them with a space.
        self._prefix, self._read = self._read, len(self._ids)
        # The first one in the text counts, not the first in the list.
        found = [(at, stop) for stop in self._stops if (at := self._text.find(stop, searched)) >= 0]
        if not found:
            return None
        at, stop = min(found)
        return StopMatch(self._text[: at + len(stop)] if self._include else self._text[:at], stop)

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(
            self._ids[start:end], skip_special_tokens=self._skip, spaces_between_special_tokens=True
        )


_BROKEN = "�"
"""The character that stands for bytes which are not valid UTF-8, or not yet."""


@dataclass(slots=True)
class GeneratedSequence:
    """The tokens that one sequence has so far. `token_ids` include the token that ended it.

    `search` looks for stop strings, None if the request has none; `stop` is the stop string that was found.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_token_id: int | None = None
    search: StopSearch | None = None
    stop: StopMatch | None = None

    @property
    def cumulative(self) -> float:
        """The sum of the log-probabilities of the generated tokens; 0 if logprobs were not requested."""
        return sum(token.chosen.logprob for token in self.logprobs)


class OutputBuilder:
    """Builds the outputs of requests, with the texts of their tokens. One object serves all requests of an engine."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def begin(self, params: SamplingParams) -> GeneratedSequence:
        """Return a new sequence without tokens for a request with these parameters."""
        if not params.stops:
            return GeneratedSequence()
        search = StopSearch(
            params.stops,
            include=params.include_stop_str_in_output,
            tokenizer=self._tokenizer,
            skip_special_tokens=params.skip_special_tokens,
        )
        return GeneratedSequence(search=search)

    def completions(self, answers: Sequence[GeneratedSequence], params: SamplingParams) -> list[CompletionOutput]:
        """Return the outputs of the `n` best of these sequences, which belong to one request.

        If there are more than `n`, the most likely come first, and the list is empty until all have ended: until then
        the choice could change.
        """
        chosen = list(answers)
        if params.use_beam_search or len(chosen) > params.n:
            if any(answer.finish_reason is None for answer in chosen):
                return []
            if not params.use_beam_search:
                # vLLM's best_of: the sum of logprobs decides, without regard to length.
                chosen = sorted(chosen, key=lambda answer: answer.cumulative, reverse=True)[: params.n]
        return [self._completion(index, answer, params) for index, answer in enumerate(chosen)]

    def logprobs_by_token(self, token: TokenLogprobs) -> dict[int, Logprob]:
        """Return the logprobs, ranks and texts of the chosen token and of the most likely tokens at its position, by
        token id."""
        return {
            entry.token_id: Logprob(entry.logprob, entry.rank, self._decoded(entry.token_id))
            for entry in [token.chosen, *token.top]
        }

    def _decoded(self, token_id: int) -> str | None:
        """Return the text of a single token, or None with `skip_tokenizer_init`."""
        return None if self._tokenizer is None else str(self._tokenizer.decode([token_id]))

    def _completion(self, index: int, answer: GeneratedSequence, params: SamplingParams) -> CompletionOutput:
        """Return the output of one sequence. `index` is its number in the request's outputs."""
        # `stop_reason` is None if the model's own end of sequence ended the text, as in vLLM.
        stop_token = answer.stop_token_id
        reason: int | str | None = stop_token if stop_token in (params.stop_token_ids or ()) else None
        logprobs: Logprobs | None = None
        if params.logprobs is not None:
            logprobs = [self.logprobs_by_token(token) for token in answer.logprobs]
        return CompletionOutput(
            index=index,
            text=self._text(answer, params),
            token_ids=list(answer.token_ids),
            cumulative_logprob=None if logprobs is None else answer.cumulative,
            logprobs=logprobs,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop.matched if answer.stop is not None else reason,
        )

    def _text(self, answer: GeneratedSequence, params: SamplingParams) -> str:
        """Return the text of a sequence. While it is running, leave out the last characters, which may become a stop
        string or change with the next token."""
        if not params.detokenize:
            return ""
        if answer.stop is not None:
            return answer.stop.text
        # A stop token is not part of the text unless the request asks for it.
        hides_last = answer.stop_token_id is not None and not params.include_stop_str_in_output
        text: str = self._tokenizer.decode(
            answer.token_ids[:-1] if hides_last else answer.token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        if answer.finish_reason is not None:
            return text
        # The last characters may be the beginning of a stop string, and an incomplete character is not text yet.
        held = max(map(len, params.stops), default=1) - 1
        return text.rstrip(_BROKEN)[: -held or None]

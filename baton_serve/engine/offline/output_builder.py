"""One answer while it grows, and as its caller sees it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from baton_serve.contracts.messages import TokenLogprobs
from baton_serve.engine.offline.outputs import CompletionOutput, Logprob, Logprobs
from baton_serve.engine.offline.params import SamplingParams


class IncrementalTokenizer(Protocol):
    """A tokenizer of transformers."""

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, spaces_between_special_tokens: bool
    ) -> str: ...


class StopMatch(NamedTuple):
    """`text` ends where the stop string `matched` begins, or after it."""

    text: str
    matched: str


class StopSearch:
    """The text of one sequence while it grows, searched for stop strings."""

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
        """Ids before `_read` are in the text; decoding begins at `_prefix`, for tokens that depend on those before."""

    def push(self, token_id: int) -> StopMatch | None:
        """The earliest stop string that the text has now."""
        self._ids.append(token_id)
        known, grown = self._decode(self._prefix, self._read), self._decode(self._prefix, len(self._ids))
        if len(grown) <= len(known) or grown.endswith(_BROKEN):
            return None
        searched = max(0, len(self._text) - max(map(len, self._stops)) + 1)
        self._text += grown[len(known) :]
        self._prefix, self._read = self._read, len(self._ids)
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


@dataclass(slots=True)
class GeneratedSequence:
    """`token_ids` include the token that ended it. `search` looks for stop strings, where any were named."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_token_id: int | None = None
    search: StopSearch | None = None
    stop: StopMatch | None = None

    @property
    def cumulative(self) -> float:
        """The sum of the log-probabilities of its tokens, where they were asked for."""
        return sum(token.chosen.logprob for token in self.logprobs)


class OutputBuilder:
    """Answers in words, by a tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def begin(self, params: SamplingParams) -> GeneratedSequence:
        if not params.stops:
            return GeneratedSequence()
        search = StopSearch(
            params.stops,
            include=params.include_stop_str_in_output,
            tokenizer=self._tokenizer,
            skip_special_tokens=params.skip_special_tokens,
        )
        return GeneratedSequence(search=search)

    def shown(self, answers: Sequence[GeneratedSequence], params: SamplingParams) -> list[CompletionOutput]:
        """As many as are wanted. Where more were written, the most likely first, and none before all have ended."""
        chosen = list(answers)
        if params.use_beam_search or len(chosen) > params.n:
            if any(answer.finish_reason is None for answer in chosen):
                return []
            if not params.use_beam_search:
                chosen = sorted(chosen, key=lambda answer: answer.cumulative, reverse=True)[: params.n]
        return [self._completion(index, answer, params) for index, answer in enumerate(chosen)]

    def named(self, token: TokenLogprobs) -> dict[int, Logprob]:
        """The chosen token, and the likeliest."""
        return {
            entry.token_id: Logprob(entry.logprob, entry.rank, self._tokenizer.decode([entry.token_id]))
            for entry in [token.chosen, *token.top]
        }

    def _completion(self, index: int, answer: GeneratedSequence, params: SamplingParams) -> CompletionOutput:
        stop_token = answer.stop_token_id
        reason: int | str | None = stop_token if stop_token in (params.stop_token_ids or ()) else None
        logprobs: Logprobs | None = None
        if params.logprobs is not None:
            logprobs = [self.named(token) for token in answer.logprobs]
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
        """Of one that still grows only what can no longer change."""
        if answer.stop is not None:
            return answer.stop.text
        hides_last = answer.stop_token_id is not None and not params.include_stop_str_in_output
        text: str = self._tokenizer.decode(
            answer.token_ids[:-1] if hides_last else answer.token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        if answer.finish_reason is not None:
            return text
        held = max(map(len, params.stops), default=1) - 1
        return text.rstrip(_BROKEN)[: -held or None]

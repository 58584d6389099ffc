"""One answer while it grows, and as its caller sees it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from baton_serve.contracts.messages import TokenLogprobs
from baton_serve.engine.offline.outputs import CompletionOutput, Logprob, Logprobs
from baton_serve.engine.offline.params import SamplingParams
from baton_serve.engine.offline.text import StopMatch, StopSearch

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

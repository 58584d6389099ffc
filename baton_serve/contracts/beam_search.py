"""Beam search over one prompt, as vLLM defines it. Pure: next tokens' log-probabilities in, tokens to ask about out.

Each running beam is asked for the most likely next tokens, twice as many as beams: so even if every beam ends, enough
go on. The score of a beam is its sum of log-probabilities over its length, prompt included and an end of sequence not,
to the power of `length_penalty`. `early_stopping` is that of transformers: True ends with enough finished beams, False
when the best running beam could not beat them at its present length, "never" when it could not at any length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from baton_serve.contracts.messages import FinishReason, TokenLogprobs

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamRules:
    width: int
    max_tokens: int
    ends: frozenset[int]
    """Tokens that end a beam."""
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False


@dataclass(frozen=True, slots=True)
class Beam:
    """`steps` tell of each token and of the most likely ones at its place."""

    token_ids: list[int]
    steps: list[TokenLogprobs]
    cumulative: float
    score: float
    finish_reason: FinishReason | None = None


class BeamSearch:
    def __init__(self, rules: BeamRules, *, num_prompt_tokens: int) -> None:
        self.running = [Beam([], [], 0.0, 0.0)]
        self._rules = rules
        self._num_prompt = num_prompt_tokens
        self._finished: list[Beam] = []

    @property
    def is_over(self) -> bool:
        return not self.running

    def advance(self, answers: Sequence[TokenLogprobs]) -> None:
        """One for each running beam, in their order: the most likely tokens after it."""
        going: list[Beam] = []
        for beam, answer in zip(self.running, answers, strict=True):
            for candidate in self._extended(beam, answer):
                (self._finished if candidate.finish_reason is not None else going).append(candidate)
        going = _best(going, self._rules.width)
        if not going or len(going[0].token_ids) >= self._rules.max_tokens:
            self._finished += [Beam(b.token_ids, b.steps, b.cumulative, b.score, "length") for b in going]
            going = []
        elif self._is_settled(going[0]):
            going = []
        self.running = going

    def best(self, count: int) -> list[Beam]:
        """Of those that have ended, the best first."""
        return _best(self._finished, count)

    def _extended(self, beam: Beam, answer: TokenLogprobs) -> list[Beam]:
        candidates: list[Beam] = []
        for one in answer.top[: 2 * self._rules.width]:
            is_end = one.token_id in self._rules.ends
            cumulative = beam.cumulative + one.logprob
            token_ids = [*beam.token_ids, one.token_id]
            score = self._score(cumulative, len(token_ids) - is_end)
            steps = [*beam.steps, TokenLogprobs(one, answer.top)]
            candidates.append(Beam(token_ids, steps, cumulative, score, "stop" if is_end else None))
        return candidates

    def _score(self, cumulative: float, num_generated: int) -> float:
        return float(cumulative / (self._num_prompt + num_generated) ** self._rules.length_penalty)

    def _is_settled(self, best: Beam) -> bool:
        """No running beam is worth going on with."""
        rules = self._rules
        if rules.early_stopping is True:
            return len(self._finished) >= rules.width
        if len(self._finished) < rules.width:
            return False
        longest = rules.early_stopping == "never" and rules.length_penalty > 0.0
        length = rules.max_tokens if longest else len(best.token_ids)
        return self.best(rules.width)[-1].score >= self._score(best.cumulative, length)


def _best(beams: Sequence[Beam], count: int) -> list[Beam]:
    return sorted(beams, key=attrgetter("score"), reverse=True)[:count]

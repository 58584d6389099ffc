"""Decides which beams of a beam search go on and which is best: cumulative logprobs, length penalty, early stopping.
Pure: the caller computes the next tokens' logprobs.

For each running beam the caller provides the most likely next tokens, twice as many as the beam width: even if every
beam ends, enough of them continue. The score of a beam is its sum of logprobs divided by its length to the power of
`length_penalty`; the length includes the prompt, but not an end-of-sequence token. `early_stopping` is defined as in
transformers: True stops when enough beams have finished; False stops when the best running beam cannot beat them at its
current length, "never" when it cannot at any length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from baton_serve.contracts.messages import FinishReason, TokenLogprobs

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamRules:
    """The parameters of one beam search, named as in vLLM."""

    width: int
    max_tokens: int
    ends: frozenset[int]
    """Token ids that end a beam."""
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    num_alternatives: int | None = None
    """Number of alternatives that the steps of a beam keep for each token; None keeps all."""


@dataclass(frozen=True, slots=True)
class Beam:
    """One candidate sequence of a beam search, without the prompt. `steps` has for each token its logprob and the most
    likely alternatives at its position."""

    token_ids: list[int]
    steps: list[TokenLogprobs]
    cumulative: float
    score: float
    finish_reason: FinishReason | None = None


class BeamSearch:
    """The state of one beam search after a prompt. Call `advance` with the model's next tokens until `is_over`, then
    `best`."""

    def __init__(self, rules: BeamRules, *, num_prompt_tokens: int) -> None:
        self.running = [Beam([], [], 0.0, 0.0)]
        self._rules = rules
        self._num_prompt = num_prompt_tokens
        self._finished: list[Beam] = []

    @property
    def is_over(self) -> bool:
        """Return whether the search has ended: no beam is extended any more."""
        return not self.running

    def advance(self, answers: Sequence[TokenLogprobs]) -> None:
        """Extend each running beam by one token, and keep the best. `answers` has one entry for each beam of `running`,
        in the same order: the most likely next tokens with their logprobs."""
        continuing: list[Beam] = []
        for beam, answer in zip(self.running, answers, strict=True):
            for candidate in self._extended(beam, answer):
                # Finished and running extensions are kept apart: the number of finished beams decides when the search
                # stops.
                (self._finished if candidate.finish_reason is not None else continuing).append(candidate)
        # No others can be among the best later. A long search could otherwise finish millions of tokens.
        self._finished = _best(self._finished, self._rules.width)
        continuing = _best(continuing, self._rules.width)
        # All running beams have the same length.
        if not continuing or len(continuing[0].token_ids) >= self._rules.max_tokens:
            self._finished += [Beam(b.token_ids, b.steps, b.cumulative, b.score, "length") for b in continuing]
            continuing = []
        elif self._is_settled(continuing[0]):
            continuing = []
        self.running = continuing

    def best(self, count: int) -> list[Beam]:
        """Return the `count` finished beams with the highest scores, the best first."""
        return _best(self._finished, count)

    def _extended(self, beam: Beam, answer: TokenLogprobs) -> list[Beam]:
        """Return the beams that extend this one by each of its most likely next tokens, which `answer` has."""
        candidates: list[Beam] = []
        alternatives = answer.top[: self._rules.num_alternatives]
        for one in answer.top[: 2 * self._rules.width]:
            is_end = one.token_id in self._rules.ends
            cumulative = beam.cumulative + one.logprob
            token_ids = [*beam.token_ids, one.token_id]
            # The end-of-sequence token does not count as length, as in vLLM.
            score = self._score(cumulative, len(token_ids) - is_end)
            steps = [*beam.steps, TokenLogprobs(one, alternatives)]
            candidates.append(Beam(token_ids, steps, cumulative, score, "stop" if is_end else None))
        return candidates

    def _score(self, cumulative: float, num_generated: int) -> float:
        """Return the score of a beam: the sum of its logprobs, `cumulative`, divided by a power of its length with the
        prompt. `num_generated` is its length without the prompt."""
        return float(cumulative / (self._num_prompt + num_generated) ** self._rules.length_penalty)

    def _is_settled(self, best: Beam) -> bool:
        """Return whether the search may stop, because no running beam can become one of the best finished ones any
        more. `best` is the best running beam."""
        rules = self._rules
        if rules.early_stopping is True:
            return len(self._finished) >= rules.width
        if len(self._finished) < rules.width:
            return False
        # With a positive penalty a longer beam may score higher: assume the best case, the maximum length.
        longest = rules.early_stopping == "never" and rules.length_penalty > 0.0
        length = rules.max_tokens if longest else len(best.token_ids)
        return self.best(rules.width)[-1].score >= self._score(best.cumulative, length)


def _best(beams: Sequence[Beam], count: int) -> list[Beam]:
    return sorted(beams, key=attrgetter("score"), reverse=True)[:count]

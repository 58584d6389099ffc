"""Runs the beam search of one offline request; scores and the choice of beams are decided in
`contracts/beam_search.py`. See `contracts.beam_search`.
"""

from collections.abc import Sequence

from baton_serve.contracts.beam_search import BeamRules, BeamSearch
from baton_serve.contracts.messages import TokenLogprobs
from baton_serve.engine.offline.output_builder import GeneratedSequence
from baton_serve.engine.offline.request_params import SamplingParams


class RequestBeams:
    """The beam search of one request. It collects the engine's outputs for all beams, and then advances the search by
    one token."""

    def __init__(self, params: SamplingParams, *, num_prompt_tokens: int, max_tokens: int, eos: frozenset[int]) -> None:
        """Start a search with these parameters after a prompt of `num_prompt_tokens` tokens, for answers of at most
        `max_tokens`.

        `eos` are the end-of-sequence tokens of the model.
        """
        stop_ids = frozenset(params.stop_token_ids or ())
        rules = BeamRules(
            width=params.width,
            max_tokens=max_tokens,
            # With `ignore_eos`, only the request's own stop tokens end a beam.
            ends=stop_ids if params.ignore_eos else stop_ids | eos,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
        )
        self._search = BeamSearch(rules, num_prompt_tokens=num_prompt_tokens)
        self._params = params
        self._outputs: dict[int, TokenLogprobs] = {}

    @property
    def num_alternatives(self) -> int:
        """How many of the most likely next tokens, with logprobs, the engine must return for each beam."""
        return max(2 * self._params.width, self._params.logprobs or 0)

    def running_beams(self) -> list[list[int]]:
        """Return the tokens of each beam that goes on, without the prompt. The engine computes the next token of each.
        Empty: the search is over."""
        return [beam.token_ids for beam in self._search.running]

    def add_output(self, beam_index: int, answer: TokenLogprobs) -> bool:
        """Record the engine's next tokens for the beam with this index. Return True if all beams have theirs now.

        Then the search has advanced by one token, and `running_beams` returns the new beams, or none at the end.
        """
        self._outputs[beam_index] = answer
        # The search compares all continuations, so it waits for the slowest beam.
        if len(self._outputs) < len(self._search.running):
            return False
        self._search.advance([self._outputs[number] for number in range(len(self._outputs))])
        self._outputs = {}
        return True

    def answers(self) -> Sequence[GeneratedSequence]:
        # The search asks for more alternatives than the caller: leave out the rest.
        """Return the `n` best beams as generated sequences, the best first. Call it when the search is over."""
        wanted = self._params.logprobs or 0
        return [
            GeneratedSequence(
                token_ids=beam.token_ids,
                logprobs=[TokenLogprobs(step.chosen, step.top[:wanted]) for step in beam.steps],
                finish_reason=beam.finish_reason,
                stop_token_id=beam.token_ids[-1] if beam.finish_reason == "stop" else None,
            )
            for beam in self._search.best(self._params.n)
        ]

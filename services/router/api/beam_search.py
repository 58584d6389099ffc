"""Run a beam search over the instances: each step requests one more token after every beam; scores are decided in
`contracts/beam_search.py`.

The prefix cache makes this cheap, because tokens that beams share are computed once. Nothing can be sent before the
search is over. The search itself is in `contracts.beam_search`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from baton_serve.contracts.beam_search import Beam, BeamSearch
from baton_serve.contracts.messages import TokenLogprobs
from baton_serve.services.router.api.generation import DeltaConsumer, explained, usage_of
from baton_serve.services.router.protocol.errors import ClientGoneError, DeadlineError
from baton_serve.services.router.protocol.openai_responses import Explanation, Usage
from baton_serve.services.router.requests.lifecycle import RequestLifecycle
from baton_serve.services.router.requests.prompt_request import PromptRequest, RequestTiming
from baton_serve.services.router.requests.token_queue import TokenQueue
from baton_serve.services.router.text.sampling_params import check_num_logprobs
from baton_serve.services.router.text.text_output import SequenceWriter, TextDelta
from baton_serve.services.router.text.token_sequence import NewTokens


class SubmitRequests(Protocol):
    """The type of the method `Dispatcher.submit`, which sends requests to instances. Their tokens arrive in
    `token_queue`.
    """

    def __call__(
        self, requests: Sequence[PromptRequest], token_queue: TokenQueue, *, timing: RequestTiming
    ) -> list[RequestLifecycle]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamPlan:
    """Describes the beam searches of one API call: for each prompt it has a request to the instances and a search."""

    requests: Sequence[PromptRequest]
    """The requests as they were without beam search. Their tokens and sampling are replaced for each step."""
    searches: Sequence[BeamSearch]
    count: int
    """Number of answers to return for each prompt."""
    num_alternatives: int
    """Number of most likely tokens that each step asks an instance for, per beam."""
    logprobs: int | None
    """Number of logprobs per token that the client wants, or None."""
    write: Callable[[], SequenceWriter]
    """Creates the converter of one beam's tokens to text."""
    timeout_s: float
    """Longest duration of all steps together (`--request-timeout-s`)."""


@dataclass(frozen=True, slots=True)
class _BeamQuery:
    """Asks an instance for the most likely next tokens after one beam of the prompt with index `prompt`."""

    prompt: int
    beam: Beam


class BeamGeneration:
    """Runs the beam searches of one API call (one for each prompt) and has the interface of a `TextGeneration`."""

    def __init__(
        self, plan: BeamPlan, submit: SubmitRequests, *, timing: RequestTiming, clock: Callable[[], float]
    ) -> None:
        """Submit the requests of the first step to the instances with `submit`. `timing` is the arrival and SLO of the
        API call. Raises `ApiError` if the requests are not admitted.
        """
        self.num_choices = plan.count * len(plan.requests)
        self.is_done = False
        self._plan = plan
        self._submit = submit
        self._arrival = timing
        self._deadline = timing.at + plan.timeout_s
        self._clock = clock
        self._token_queue = TokenQueue()
        self._num_steps = 0
        self._num_generated = 0
        self._step_lifecycles: Sequence[RequestLifecycle] = ()
        self._queries = self._submit_step()
        # The requests of the first step stand for the whole API call in usage and explanations: there is one for each
        # prompt, with exactly its tokens.
        self.lifecycles = self._step_lifecycles

    def lifecycle(self, choice: int) -> RequestLifecycle:
        return self.lifecycles[choice // self._plan.count]

    async def take(self, consumer: DeltaConsumer | None = None) -> list[tuple[int, TextDelta]]:
        """Run all searches to their end and return one complete delta for each choice, with the index of the choice.
        `consumer` is not used.

        Raises the `ApiError` that ended a request, or `ClientGoneError` after `abandon`.
        """
        while self._queries:
            await self._apply_answers()
            if (wanted := self._plan.logprobs) is not None:
                num_kept = self._num_steps * len(self._queries) * (wanted + 1)
                check_num_logprobs(num_kept, remedy="ask for fewer beams, tokens or alternatives; all beams count")
            self._queries = self._submit_step()
        self.is_done = True
        best = [beam for search in self._plan.searches for beam in search.best(self._plan.count)]
        return [(choice, self._delta(beam)) for choice, beam in enumerate(best)]

    def abandon(self) -> None:
        """Cancel the searches because the client has disconnected, and make `take` raise `ClientGoneError`."""
        self._token_queue.fail(ClientGoneError("the client disconnected"))
        self.cancel("the client disconnected")

    def cancel(self, reason: str) -> None:
        for lifecycle in self._step_lifecycles:
            lifecycle.cancel(reason)

    def usage(self) -> Usage:
        return usage_of(self.lifecycles, self._num_generated)

    def explain(self) -> Explanation | list[Explanation]:
        return explained(self.lifecycles, self._clock())

    def _submit_step(self) -> list[_BeamQuery]:
        """Submit one request to the instances for each beam that can still grow, of all prompts. Return the queries
        that the requests ask; an empty list if all searches are over.
        """
        searches = self._plan.searches
        queries = [_BeamQuery(i, beam) for i, search in enumerate(searches) for beam in search.running]
        if queries:
            requests = [self._prompt_request(number, query) for number, query in enumerate(queries)]
            self._step_lifecycles = self._submit(requests, self._token_queue, timing=self._timing_of_step())
            self._num_steps += 1
        return queries

    def _timing_of_step(self) -> RequestTiming:
        """Return the arrival times for the requests of the next step. Raises `DeadlineError` if the whole search has
        taken longer than `--request-timeout-s`.
        """
        if self._num_steps == 0:
            return self._arrival
        # `continues` exempts later steps from admission and from the limits of the API key: the first step has passed
        # them for the whole search.
        now = self._clock()
        if now > self._deadline:
            raise DeadlineError(f"the beam search did not end within {self._plan.timeout_s:g} s (--request-timeout-s)")
        return msgspec.structs.replace(self._arrival, at=now, tokenizing_at=now, tokenized_at=now, continues=True)

    async def _apply_answers(self) -> None:
        """Wait for the instances' answers to all queries of the present step, and extend the beams with them."""
        answers: dict[int, TokenLogprobs] = {}
        while len(answers) < len(self._queries):
            # Answers come in any order. Updates without logprobs only report the end of a request.
            for output in await self._token_queue.take():
                if output.tokens.logprobs:
                    answers[output.choice] = output.tokens.logprobs[0]
        for prompt, search in enumerate(self._plan.searches):
            own = [answers[number] for number, query in enumerate(self._queries) if query.prompt == prompt]
            if own:
                search.advance(own)

    def _prompt_request(self, number: int, query: _BeamQuery) -> PromptRequest:
        """Return the request that asks for the one next token after a beam; `number` is the query's index in this
        step.
        """
        request, token_ids = self._plan.requests[query.prompt], query.beam.token_ids
        is_first = self._num_steps == 0
        # Greedy and without stop tokens: only the logprobs count, and the search itself decides when a beam ends. The
        # logprobs of the prompt are the same in every step, so only the first one computes them.
        sampling = msgspec.structs.replace(
            request.sampling,
            max_tokens=1,
            temperature=0.0,
            logprobs=self._plan.num_alternatives,
            prompt_logprobs=request.sampling.prompt_logprobs if is_first else None,
            stop_token_ids=[],
            ignore_eos=True,
        )
        request_id = request.request_id if is_first else f"{request.request_id}-{self._num_steps}.{number}"
        return msgspec.structs.replace(
            request,
            request_id=request_id,
            token_ids=request.token_ids + token_ids,
            num_bidirectional_tokens=len(request.token_ids),
            sampling=sampling,
            num_sequences=1,
            first_choice=number,
        )

    def _delta(self, beam: Beam) -> TextDelta:
        """Convert a finished beam to the text delta of its choice, and add its tokens to the token counts of the API
        call.
        """
        writer, num_logprobs = self._plan.write(), self._plan.logprobs
        logprobs = beam.steps if num_logprobs is not None else None
        stop_token_id = beam.token_ids[-1] if beam.finish_reason == "stop" else None
        text_delta = writer.push(NewTokens(beam.token_ids, logprobs, beam.finish_reason, stop_token_id))
        self._num_generated += writer.num_tokens
        return text_delta

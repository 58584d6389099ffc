"""Answers found by beam search: every step asks the instances for one token after each beam.

The prefix cache makes that cheap: what the beams share is computed once. Nothing can be sent before the search is over.
The search itself is `contracts.beam_search`.
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
from baton_serve.services.router.text.text_output import SequenceWriter, TextDelta
from baton_serve.services.router.text.token_sequence import NewTokens


class SubmitRequests(Protocol):
    def __call__(
        self, requests: Sequence[PromptRequest], token_queue: TokenQueue, *, timing: RequestTiming
    ) -> list[RequestLifecycle]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamPlan:
    """`requests` and `searches`: one a prompt, of which `count` answers are wanted. `logprobs` is what the client
    wants."""

    requests: Sequence[PromptRequest]
    searches: Sequence[BeamSearch]
    count: int
    num_alternatives: int
    logprobs: int | None
    write: Callable[[], SequenceWriter]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class _Question:
    """What comes after this beam of this prompt?"""

    prompt: int
    beam: Beam


class BeamGeneration:
    """`services.router.api.generation.Answering`."""

    def __init__(
        self, plan: BeamPlan, submit: SubmitRequests, *, timing: RequestTiming, clock: Callable[[], float]
    ) -> None:
        """Asks for the first tokens. Raises `ApiError`."""
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
        self._asked: Sequence[RequestLifecycle] = ()
        self._questions = self._submit_step()
        self.lifecycles = self._asked

    def lifecycle(self, choice: int) -> RequestLifecycle:
        return self.lifecycles[choice // self._plan.count]

    async def take(self, consumer: DeltaConsumer | None = None) -> list[tuple[int, TextDelta]]:
        """All choices, complete: nothing to follow. Raises `ApiError` or `ClientGoneError`."""
        while self._questions:
            await self._apply_answers()
            self._questions = self._submit_step()
        self.is_done = True
        best = [beam for search in self._plan.searches for beam in search.best(self._plan.count)]
        return [(choice, self._piece(beam)) for choice, beam in enumerate(best)]

    def abandon(self) -> None:
        """The client has gone."""
        self._token_queue.fail(ClientGoneError("the client disconnected"))
        self.cancel("the client disconnected")

    def cancel(self, reason: str) -> None:
        for lifecycle in self._asked:
            lifecycle.cancel(reason)

    def usage(self) -> Usage:
        return usage_of(self.lifecycles, self._num_generated)

    def explain(self) -> Explanation | list[Explanation]:
        return explained(self.lifecycles, self._clock())

    def _submit_step(self) -> list[_Question]:
        searches = self._plan.searches
        questions = [_Question(i, beam) for i, search in enumerate(searches) for beam in search.running]
        if questions:
            requests = [self._prompt_request(number, question) for number, question in enumerate(questions)]
            self._asked = self._submit(requests, self._token_queue, timing=self._arrival_of_step())
            self._num_steps += 1
        return questions

    def _arrival_of_step(self) -> RequestTiming:
        """Raises `DeadlineError`."""
        if self._num_steps == 0:
            return self._arrival
        now = self._clock()
        if now > self._deadline:
            raise DeadlineError(f"the beams were not done within {self._plan.timeout_s:g} s")
        return msgspec.structs.replace(self._arrival, at=now, tokenizing_at=now, tokenized_at=now, continues=True)

    async def _apply_answers(self) -> None:
        """The searches go on with what the instances say."""
        answers: dict[int, TokenLogprobs] = {}
        while len(answers) < len(self._questions):
            for output in await self._token_queue.take():
                if output.tokens.logprobs:
                    answers[output.choice] = output.tokens.logprobs[0]
        for prompt, search in enumerate(self._plan.searches):
            mine = [answers[number] for number, question in enumerate(self._questions) if question.prompt == prompt]
            if mine:
                search.advance(mine)

    def _prompt_request(self, number: int, question: _Question) -> PromptRequest:
        request, token_ids = self._plan.requests[question.prompt], question.beam.token_ids
        is_first = self._num_steps == 0
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
            sampling=sampling,
            num_sequences=1,
            first_choice=number,
        )

    def _piece(self, beam: Beam) -> TextDelta:
        writer, wanted = self._plan.write(), self._plan.logprobs
        logprobs = None
        if wanted is not None:
            logprobs = [TokenLogprobs(step.chosen, step.top[:wanted]) for step in beam.steps]
        stop_token_id = beam.token_ids[-1] if beam.finish_reason == "stop" else None
        text_delta = writer.push(NewTokens(beam.token_ids, logprobs, beam.finish_reason, stop_token_id))
        self._num_generated += writer.num_tokens
        return text_delta

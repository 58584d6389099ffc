"""Runs requests of the offline API on an `Engine`, and collects their tokens; their order is decided in `llm.py`.

The caller steps it, and calls `forget` for requests that have ended.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from baton_serve.contracts import sampling
from baton_serve.contracts.block_hash import root_hash
from baton_serve.contracts.identity import RequestId
from baton_serve.contracts.media import MediaSpan
from baton_serve.contracts.messages import TokenLogprobs, Work, with_prompt_root
from baton_serve.engine.core.outputs import SequenceOutput
from baton_serve.engine.engine import Engine
from baton_serve.engine.errors import EngineError, RequestError
from baton_serve.engine.model.vision.image_types import NO_PIXELS, Pixels
from baton_serve.engine.offline.beams import RequestBeams
from baton_serve.engine.offline.output_builder import GeneratedSequence, OutputBuilder
from baton_serve.engine.offline.outputs import RequestOutput, new_part
from baton_serve.engine.offline.request_params import RequestOutputKind, SamplingParams
from baton_serve.engine.offline.requested_adapters import LoRARequest
from baton_serve.engine.offline.structured import GrammarWriter


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A tokenized prompt with everything that its request needs.

    Lower values of `priority` run first. `lora` is an adapter's fingerprint; "": none. `media` are the spans of image
    tokens, and `pixels` the preprocessed images.
    """

    text: str | None
    token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    lora_request: LoRARequest | None = None
    lora: str = ""
    media: list[MediaSpan] = field(default_factory=list)
    pixels: Pixels = field(default_factory=lambda: NO_PIXELS)


@dataclass(slots=True)
class StepChanges:
    """The requests that one step has changed: `changed` have new output, `ended` are those of them that have ended, and
    `failed` have ended with an error."""

    changed: dict[RequestId, None] = field(default_factory=dict)
    ended: list[RequestId] = field(default_factory=list)
    failed: dict[RequestId, EngineError] = field(default_factory=dict)


@dataclass(slots=True)
class _Request:
    """One request of the caller of `LLMEngine`, while it runs.

    `engine_ids` are the ids of its requests on the engine: one, or in a beam search one for each beam.
    """

    prompted: PreparedPrompt
    sampling: sampling.SamplingSpec
    answers: list[GeneratedSequence]
    beams: RequestBeams | None = None
    engine_ids: list[RequestId] = field(default_factory=list)
    num_steps: int = 0
    num_cached_tokens: int = 0
    delivered: RequestOutput | None = None
    """The last output that the caller has got, if it gets parts (`RequestOutputKind.DELTA`)."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def has_ended(self) -> bool:
        """True when all sequences of the request have ended."""
        return all(answer.finish_reason is not None for answer in self.answers)


class RequestRunner:
    """Runs the requests of one `LLMEngine` on its engine, and collects their tokens. In a beam search one request
    becomes several short ones on the engine."""

    def __init__(self, engine: Engine, tokenizer: Any, *, seed: int) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._output_builder = OutputBuilder(tokenizer)
        self._grammar_writer = GrammarWriter(tokenizer)
        self._seed = seed
        self._num_requests = 0
        self._requests: dict[RequestId, _Request] = {}
        self._origins: dict[RequestId, tuple[RequestId, int]] = {}
        """By id on the engine: the caller's request that it belongs to, and the index of the beam that it continues."""

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    @property
    def num_requests(self) -> int:
        """The number of requests that were added and not forgotten."""
        return len(self._requests)

    def add(self, request_id: RequestId, prompted: PreparedPrompt) -> None:
        """Add a request to the engine. Raises `RequestError` if it can never be served; then nothing of it is kept."""
        # The engine would raise only after the first request with this id was replaced here.
        if request_id in self._requests:
            raise RequestError("invalid", f"request id {request_id!r} is already in use")
        engine, params = self._engine, prompted.params
        num_tokens = len(prompted.token_ids)
        # A prompt without room for an answer must still reach the engine, whose check names the limit that it exceeds.
        resolved = params.resolved(
            seed=self._seed + self._num_requests,
            room=max(1, engine.max_model_len - num_tokens),
            grammar=self._grammar(params),
            bad_words=_tokens_of_words(self._tokenizer, params.bad_words or []),
        )
        self._num_requests += 1
        request = _Request(prompted, resolved, [self._output_builder.begin(params) for _ in range(params.width)])
        if params.use_beam_search:
            request.beams = RequestBeams(
                params, num_prompt_tokens=num_tokens, max_tokens=resolved.max_tokens, eos=engine.eos_token_ids
            )
        self._requests[request_id] = request
        try:
            self._submit(request_id, request)
        # Some beams may have been added already.
        except BaseException:
            self.forget(request_id)
            raise

    def step(self) -> StepChanges:
        """Run one step of the engine for all requests, and return which requests have new output, ended or failed."""
        stepped = StepChanges()
        result = self._engine.step()
        for engine_id, message, code in result.failed:
            # A request may have been forgotten by the caller while the step was running.
            if engine_id in self._origins:
                is_invalid = code == "invalid"
                error = RequestError(code, message) if is_invalid else EngineError(f"request {engine_id}: {message}")
                self._fail(self._origins[engine_id][0], error, stepped)
        for first in result.first:
            request_id, _ = self._origins.get(first.request_id, (None, 0))
            # Later steps of a beam search find the prompt in the cache. Only the first says what was cached before the
            # request.
            if request_id is not None and (request := self._requests[request_id]).num_steps == 1:
                request.num_cached_tokens, request.prompt_logprobs = first.cached_tokens, first.prompt_logprobs
        for output in result.tokens:
            if output.request_id in self._origins:
                self._take(output, stepped)
        # Computed at the end: a request may have got several outputs in this step.
        stepped.ended = [request_id for request_id in stepped.changed if self._requests[request_id].has_ended]
        return stepped

    def output(self, request_id: RequestId) -> RequestOutput:
        """Return the output that a request has so far. The id must be known."""
        request = self._requests[request_id]
        prompted, logprobs = request.prompted, request.prompt_logprobs
        named = self._output_builder.logprobs_by_token
        return RequestOutput(
            request_id=request_id,
            prompt=prompted.text,
            prompt_token_ids=prompted.token_ids,
            prompt_logprobs=None if logprobs is None else [None if t is None else named(t) for t in logprobs],
            outputs=self._output_builder.completions(request.answers, prompted.params),
            num_cached_tokens=request.num_cached_tokens,
            finished=request.has_ended,
            lora_request=prompted.lora_request,
        )

    def next_output(self, request_id: RequestId) -> RequestOutput | None:
        """Return the output that a request's caller gets after a step, by its `output_kind`; None if it gets none
        now."""
        request, output = self._requests[request_id], self.output(request_id)
        match request.prompted.params.output_kind:
            case RequestOutputKind.CUMULATIVE:
                return output
            case RequestOutputKind.FINAL_ONLY:
                return output if output.finished else None
            case RequestOutputKind.DELTA:
                request.delivered, before = output, request.delivered
                return new_part(output, before)

    def forget(self, request_id: RequestId) -> None:
        """End a request in any state, and drop its tokens. An unknown id is ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._cancel_on_engine(request)

    def _grammar(self, params: SamplingParams) -> str | None:
        """Return the grammar of a request's structured output, after compiling it; None for free text. Raises
        `ConfigError` or `RequestError` if it is not valid."""
        if params.form is None:
            return None
        grammar = self._grammar_writer.write(params.form)
        # Wait here: an invalid grammar must be reported before the request is added.
        self._engine.compile_grammar(grammar).result()
        return grammar

    def _submit(self, request_id: RequestId, request: _Request) -> None:
        """Add a request to the engine; in a beam search, one request for each beam that goes on. Raises
        `RequestError`."""
        request.num_steps += 1
        if request.beams is None:
            self._add_to_engine(request_id, request, request_id, 0, [], request.sampling)
            return
        is_first = request.num_steps == 1
        params_on_engine = _sampling_of_beams(request.sampling, request.beams.num_alternatives, is_first=is_first)
        for number, token_ids in enumerate(request.beams.running_beams()):
            # The first step keeps the caller's id, so that logs and errors of the prompt show it.
            engine_id = request_id if is_first else RequestId(f"{request_id}/{request.num_steps}.{number}")
            self._add_to_engine(request_id, request, engine_id, number, token_ids, params_on_engine)

    def _add_to_engine(
        self,
        request_id: RequestId,
        request: _Request,
        engine_id: RequestId,
        number: int,
        generated: list[int],
        params_on_engine: sampling.SamplingSpec,
    ) -> None:
        """Add one request to the engine, under the id `engine_id`: the prompt, followed by the tokens `generated` of
        beam `number`. `params_on_engine` are its sampling parameters; `request_id` is the caller's id."""
        layout, prompted = self._engine.layout, request.prompted
        token_ids = prompted.token_ids + generated
        work = Work(
            request_id=engine_id,
            token_ids=token_ids,
            # Tokens of a beam count as prompt: the engine would otherwise count them against max_tokens.
            num_prompt_tokens=len(token_ids),
            sampling=params_on_engine,
            root=root_hash(
                fingerprint=layout.fingerprint,
                kv_dtype=layout.dtype,
                block_tokens=layout.block_tokens,
                lora=prompted.lora,
            ),
            num_bidirectional_tokens=len(prompted.token_ids),
            # Each beam is a request of its own with one sequence.
            sequences=[0] if request.beams is not None else list(range(prompted.params.width)),
            priority=prompted.priority,
            lora=prompted.lora,
            media=prompted.media,
        )
        work = with_prompt_root(work, layout)
        self._engine.add(work, pixels=prompted.pixels, logits_processors=prompted.params.processors())
        request.engine_ids.append(engine_id)
        self._origins[engine_id] = (request_id, number)

    def _take(self, output: SequenceOutput, stepped: StepChanges) -> None:
        """Record new tokens from the engine for the request that they belong to. In a beam search, start the next token
        when all beams have theirs."""
        request_id, number = self._origins[output.request_id]
        request = self._requests[request_id]
        if request.beams is None:
            self._extend(output, request)
        elif output.logprobs and request.beams.add_output(number, output.logprobs[0]):
            self._cancel_on_engine(request)
            # No running beam is left when the search is over.
            if request.beams.running_beams():
                try:
                    self._submit(request_id, request)
                except RequestError as exc:
                    self._fail(request_id, exc, stepped)
                return
            request.answers = list(request.beams.answers())
        else:
            return
        stepped.changed[request_id] = None

    def _extend(self, output: SequenceOutput, request: _Request) -> None:
        """Append new tokens to a sequence of a request. If they complete a stop string, end the sequence, also on the
        engine."""
        answer = request.answers[output.sequence]
        if answer.finish_reason is not None:
            return  # the step was running already when a stop string ended the text
        for number, token_id in enumerate(output.token_ids):
            answer.token_ids.append(token_id)
            if output.logprobs is not None:
                answer.logprobs.append(output.logprobs[number])
            if _ends_text(output, answer, token_id, request.prompted.params.min_tokens):
                answer.finish_reason = "stop"
                # The engine does not know stop strings, so it would continue.
                self._engine.cancel(output.request_id, output.sequence)
                return
        answer.finish_reason, answer.stop_token_id = output.finish_reason, output.stop_token_id

    def _fail(self, request_id: RequestId, error: EngineError, stepped: StepChanges) -> None:
        """Forget a request, and put its error into `stepped` instead of its output."""
        self.forget(request_id)
        stepped.changed.pop(request_id, None)
        stepped.failed[request_id] = error

    def _cancel_on_engine(self, request: _Request) -> None:
        """End all requests on the engine that belong to this request of the caller."""
        for engine_id in request.engine_ids:
            self._engine.cancel(engine_id)
            self._origins.pop(engine_id, None)
        request.engine_ids = []


def _sampling_of_beams(given: sampling.SamplingSpec, num_alternatives: int, *, is_first: bool) -> sampling.SamplingSpec:
    """Return the parameters of an engine's request for the next token of a beam: it returns the `num_alternatives` most
    likely tokens. `is_first` says that the search begins, when prompt logprobs are computed."""
    return msgspec.structs.replace(
        given,
        max_tokens=1,
        logprobs=num_alternatives,
        prompt_logprobs=given.prompt_logprobs if is_first else None,
        # The search decides itself where a beam ends. The engine must return the end token as any other.
        stop_token_ids=[],
        ignore_eos=True,
    )


def _ends_text(output: SequenceOutput, answer: GeneratedSequence, token_id: int, min_tokens: int) -> bool:
    """Append a token to a sequence's search for stop strings. Return whether it completes one, and more than
    `min_tokens` tokens are generated."""
    if answer.search is None or token_id == output.stop_token_id:
        return False
    stop = answer.search.push(token_id)
    if stop is None or len(answer.token_ids) <= min_tokens:
        return False
    answer.stop = stop
    return True


def _tokens_of_words(tokenizer: Any, words: list[str]) -> list[list[int]]:
    """Return the token sequences that spell each of these words, at the beginning of a text and after a space, as vLLM
    does for `bad_words`."""
    found: list[list[int]] = []
    for word in words:
        first, later = (tokenizer.encode(text, add_special_tokens=False) for text in (word, " " + word.lstrip()))
        found += [first] if first else []
        # If the space changes the number of tokens, it is probably a token of its own, and the sequence without it also
        # matches after a space.
        if first and later[0] != first[0] and len(later) == len(first):
            found.append(later)
    return found

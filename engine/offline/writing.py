"""Prompts to answers: adds them all to an engine and steps it until the last has ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from contracts.identity import RequestId
from contracts.messages import TokenLogprobs, Work
from contracts.naming import root_name
from engine.engine import Engine
from engine.errors import EngineError, RequestError
from engine.offline.lora import LoRARequest
from engine.offline.outputs import CompletionOutput, Logprob, RequestOutput
from engine.offline.params import SamplingParams
from engine.offline.progress import Progress
from engine.offline.text import Stop, StopSearch
from engine.outputs import SequenceOutput, StepResult


@dataclass(frozen=True, slots=True)
class Prompted:
    """`priority`: smaller runs first. `lora` is an adapter's fingerprint; empty: none."""

    text: str | None
    token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    lora_request: LoRARequest | None = None
    lora: str = ""


@dataclass(slots=True)
class _Sequence:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_token_id: int | None = None
    search: StopSearch | None = None
    stop: Stop | None = None


@dataclass(slots=True)
class _Request:
    prompted: Prompted
    sequences: list[_Sequence]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class Writer:
    def __init__(self, engine: Engine, tokenizer: Any, *, seed: int) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._seed = seed
        self._num_requests = 0
        self._requests: dict[RequestId, _Request] = {}

    def write(self, prompts: Sequence[Prompted], progress: Progress) -> list[RequestOutput]:
        """In the order of the prompts. Raises `RequestError` for one that cannot be served, before any is."""
        ids: list[RequestId] = []
        try:
            for prompted in prompts:
                ids.append(self._add(prompted))
            running = set(ids)
            while running:
                for request_id in self._apply(self._engine.step()) & running:
                    running.discard(request_id)
                    request = self._requests[request_id]
                    written = sum(len(sequence.token_ids) for sequence in request.sequences)
                    progress.done(len(request.prompted.token_ids), written)
            return [self._output(request_id) for request_id in ids]
        finally:
            for request_id in ids:
                self._engine.cancel(request_id)
                self._requests.pop(request_id, None)

    def _add(self, prompted: Prompted) -> RequestId:
        engine, params = self._engine, prompted.params
        request_id = RequestId(str(self._num_requests))
        layout = engine.layout
        room = max(1, engine.max_model_len - len(prompted.token_ids))
        work = Work(
            request_id=request_id,
            token_ids=prompted.token_ids,
            num_prompt_tokens=len(prompted.token_ids),
            sampling=params.resolved(seed=self._seed + self._num_requests, room=room),
            root=root_name(
                fingerprint=layout.fingerprint,
                kv_dtype=layout.dtype,
                block_tokens=layout.block_tokens,
                lora=prompted.lora,
            ),
            sequences=list(range(params.n)),
            priority=prompted.priority,
            lora=prompted.lora,
        )
        self._num_requests += 1
        engine.add(work)
        self._requests[request_id] = _Request(prompted, [self._sequence(params) for _ in range(params.n)])
        return request_id

    def _sequence(self, params: SamplingParams) -> _Sequence:
        if not params.stops:
            return _Sequence()
        search = StopSearch(
            params.stops,
            include=params.include_stop_str_in_output,
            tokenizer=self._tokenizer,
            skip_special_tokens=params.skip_special_tokens,
        )
        return _Sequence(search=search)

    def _apply(self, result: StepResult) -> set[RequestId]:
        """Requests that have ended with this step. Raises `EngineError` for one that failed."""
        for request_id, message, code in result.failed:
            raise RequestError(code, message) if code == "invalid" else EngineError(f"request {request_id}: {message}")
        for first in result.first:
            request = self._requests[first.request_id]
            request.num_cached_tokens, request.prompt_logprobs = first.cached_tokens, first.prompt_logprobs
        touched: set[RequestId] = set()
        for output in result.tokens:
            self._extend(output)
            touched.add(output.request_id)
        return {id_ for id_ in touched if all(s.finish_reason is not None for s in self._requests[id_].sequences)}

    def _extend(self, output: SequenceOutput) -> None:
        sequence = self._requests[output.request_id].sequences[output.sequence]
        if sequence.finish_reason is not None:
            return  # a step that was under way when its text had ended
        for number, token_id in enumerate(output.token_ids):
            sequence.token_ids.append(token_id)
            if output.logprobs is not None:
                sequence.logprobs.append(output.logprobs[number])
            if self._ends_text(output, sequence, token_id):
                sequence.finish_reason = "stop"
                self._engine.cancel(output.request_id, output.sequence)
                return
        sequence.finish_reason, sequence.stop_token_id = output.finish_reason, output.stop_token_id

    def _ends_text(self, output: SequenceOutput, sequence: _Sequence, token_id: int) -> bool:
        if sequence.search is None or token_id == output.stop_token_id:
            return False
        stop = sequence.search.push(token_id)
        if stop is None or len(sequence.token_ids) <= self._requests[output.request_id].prompted.params.min_tokens:
            return False
        sequence.stop = stop
        return True

    def _output(self, request_id: RequestId) -> RequestOutput:
        request = self._requests[request_id]
        prompted, logprobs = request.prompted, request.prompt_logprobs
        return RequestOutput(
            request_id=request_id,
            prompt=prompted.text,
            prompt_token_ids=prompted.token_ids,
            prompt_logprobs=None if logprobs is None else [None if t is None else self._named(t) for t in logprobs],
            outputs=[self._completion(index, s, prompted.params) for index, s in enumerate(request.sequences)],
            num_cached_tokens=request.num_cached_tokens,
            lora_request=prompted.lora_request,
        )

    def _completion(self, index: int, sequence: _Sequence, params: SamplingParams) -> CompletionOutput:
        stop_token = sequence.stop_token_id
        hides_last = stop_token is not None and not params.include_stop_str_in_output
        shown = sequence.token_ids[:-1] if hides_last else sequence.token_ids
        text = sequence.stop.text if sequence.stop is not None else self._decode(shown, params)
        reason: int | str | None = stop_token if stop_token in (params.stop_token_ids or ()) else None
        wants = params.logprobs is not None
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=sequence.token_ids,
            cumulative_logprob=sum(t.chosen.logprob for t in sequence.logprobs) if wants else None,
            logprobs=[self._named(token) for token in sequence.logprobs] if wants else None,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop.matched if sequence.stop is not None else reason,
        )

    def _named(self, token: TokenLogprobs) -> dict[int, Logprob]:
        """The chosen token, and the likeliest."""
        return {
            entry.token_id: Logprob(entry.logprob, entry.rank, self._tokenizer.decode([entry.token_id]))
            for entry in [token.chosen, *token.top]
        }

    def _decode(self, token_ids: Sequence[int], params: SamplingParams) -> str:
        text: str = self._tokenizer.decode(
            token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        return text

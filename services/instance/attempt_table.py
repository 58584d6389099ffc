"""Keeps the attempts that run on this instance, and decides what a step's results mean for each and its router.

Pure bookkeeping: no socket, clock or task. Request ids are chosen by routers: two routers may use the same id, and a
router may repeat an id while its previous attempt still ends. So each attempt gets an id of its own inside the process.
"""

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from baton_serve.contracts.events import Tier
from baton_serve.contracts.identity import InstanceId, RequestId
from baton_serve.contracts.messages import Answer, ErrorCode, PrefillReport, Tokens, Work
from baton_serve.contracts.prompt_logprobs import encode_logprobs
from baton_serve.engine.core.outputs import CompletedBlocks, CompletedLayerGroups, FirstTokenInfo, SequenceOutput
from baton_serve.services.common.rpc.instance_link import RouterId
from baton_serve.services.common.tracing import NO_SPAN, Span
from baton_serve.services.instance.interfaces import StepResult


class RequestObserver(Protocol):
    """The callbacks by which the handler of a role (prefill, decode, unified) follows one request in the engine. They
    are called on the event loop and must not block.
    """

    def completed(self, blocks: CompletedBlocks) -> None: ...
    def completed_layer_groups(self, blocks: CompletedBlocks, parts: range) -> None:
        """Called when the layer groups with the numbers `parts` of these blocks are computed; `completed` follows for
        the whole blocks.
        """

    def token(self, output: SequenceOutput) -> None: ...
    def held(self, at: float) -> None:
        """Called when the prompt is computed, its first tokens have been reported, and the engine keeps its blocks. The
        step ended at `at` (`time.monotonic()`).
        """

    def ended(self) -> None:
        """Called when no sequence of the request generates tokens any more."""

    def failed(self, code: ErrorCode, message: str) -> None: ...


@dataclass(frozen=True, slots=True)
class PulledPrefix:
    """The part of a prompt whose blocks were fetched from the cache of another instance (`source`) instead of being
    computed.
    """

    source: InstanceId
    num_tokens: int
    seconds: float


@dataclass(eq=False, slots=True)
class AttemptEntry:
    """One attempt at a request on this instance, from its acceptance until its resources are free. `request_id` is the
    id that the router gave it; `work.request_id` is the id that is unique inside this process.
    """

    router: RouterId
    request_id: RequestId
    work: Work
    progress: RequestObserver | None = None
    live: set[int] = field(init=False)
    """Indexes of the sequences that still generate tokens. Empty once the router expects nothing more."""
    is_admitted: bool = False
    """Whether the engine runs the sequences, so that a single one can be cancelled."""
    span: Span = NO_SPAN
    pulled: PulledPrefix | None = None
    failed_encoders: list[InstanceId] = field(default_factory=list)
    """Encode instances whose embeddings did not arrive."""
    grammar: object = None
    """Keeps the compiled grammar in the engine until the attempt ends, or None without a grammar."""

    def __post_init__(self) -> None:
        self.live = set(self.work.sequences)

    def end_sequence(self, sequence: int) -> None:
        """Mark the sequence with this index as ended, and call the observer's `ended` after the last one."""
        if sequence in self.live:
            self.live.discard(sequence)
            if not self.live and self.progress is not None:
                self.progress.ended()


class AttemptTable:
    """Holds all attempts of this instance by their ids and their routers. `RequestServer` owns it. Use it only on the
    event loop.
    """

    def __init__(self) -> None:
        self._by_id: dict[RequestId, AttemptEntry] = {}
        self._by_router: dict[RouterId, dict[RequestId, AttemptEntry]] = {}
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, router: RouterId, work: Work) -> AttemptEntry:
        """Add an attempt at the request `work` for `router`, and return it with a new id that is unique inside this
        process.

        The router must have no live attempt with the same request id; the caller checks that with `find` and detaches
        an old one.
        """
        self._num_added += 1
        engine_request_id = RequestId(f"{work.request_id}#{self._num_added}")
        request = AttemptEntry(router, work.request_id, msgspec.structs.replace(work, request_id=engine_request_id))
        self._by_id[engine_request_id] = request
        self._by_router.setdefault(router, {})[work.request_id] = request
        return request

    def find(self, router: RouterId, request_id: RequestId) -> AttemptEntry | None:
        """Return the attempt of `router` with this request id, or None if there is none or it is detached (no messages
        for it are sent any more).
        """
        return self._by_router.get(router, {}).get(request_id)

    def detach(self, request: AttemptEntry) -> None:
        """Send the router no more messages about this attempt. The router has given it up and may use the request id
        again; the attempt's resources are not free yet.
        """
        attempts = self._by_router.get(request.router, {})
        # After a repeated id the entry may belong to the newer attempt, which must stay.
        if attempts.get(request.request_id) is request:
            del attempts[request.request_id]
            if not attempts:
                del self._by_router[request.router]
        request.live.clear()

    def remove(self, request: AttemptEntry) -> None:
        """Remove an attempt from the table. Call it when all its resources are free."""
        self.detach(request)
        del self._by_id[request.work.request_id]

    def of_router(self, router: RouterId) -> list[AttemptEntry]:
        """Return a copy of the list of a router's attempts, without detached ones (no messages for them are sent any
        more).
        """
        return list(self._by_router.get(router, {}).values())

    def all(self) -> list[AttemptEntry]:
        """Return all attempts, including detached ones, whose resources are not free yet."""
        return list(self._by_id.values())

    def apply(self, result: StepResult, at: float) -> dict[RouterId, list[Answer]]:
        """Pass the results of one engine step to the observers of their requests, and return the answers to send to
        each router. Completed blocks are reported first, because a handoff waits for them. `at` is the time at which
        the step ended (`time.monotonic()`).
        """
        for blocks in result.completed:
            if progress := self._progress(blocks.request_id):
                progress.completed(blocks)
        answers: dict[RouterId, list[Answer]] = {}
        # A cancelled attempt has no live sequence: its router must not receive anything more.
        for info in result.first:
            if (request := self._by_id.get(info.request_id)) is not None and request.live:
                _trace_prompt(request.span, info, at)
                answers.setdefault(request.router, []).append(prefill_report(request, info))
        for output in result.tokens:
            request = self._by_id.get(output.request_id)
            if request is not None and output.sequence in request.live:
                answers.setdefault(request.router, []).append(tokens_of(request, output))
                if request.progress is not None:
                    request.progress.token(output)
        # After the tokens, so that an observer has the first tokens when `held` is called.
        self._apply_ends(result, at)
        return answers

    def apply_layer_groups(self, tail: CompletedLayerGroups) -> None:
        """Pass layer groups that the engine has computed to the observers of their requests, while the step is still
        running.
        """
        for blocks in tail.blocks:
            if progress := self._progress(blocks.request_id):
                progress.completed_layer_groups(blocks, tail.parts)

    def _apply_ends(self, result: StepResult, at: float) -> None:
        for engine_request_id in result.held:
            if progress := self._progress(engine_request_id):
                progress.held(at)
        for output in result.tokens:
            if output.finish_reason is not None and (request := self._by_id.get(output.request_id)) is not None:
                request.end_sequence(output.sequence)
        for engine_request_id, message, code in result.failed:
            if progress := self._progress(engine_request_id):
                progress.failed(code, message)

    def _progress(self, engine_request_id: RequestId) -> RequestObserver | None:
        request = self._by_id.get(engine_request_id)
        return None if request is None else request.progress

    def check_invariants(self) -> None:
        """Assert that the two indexes of the table, by id and by router, hold the same attempts. Only tests call it."""
        for router, attempts in self._by_router.items():
            assert attempts, "a router without requests is remembered"
            for request_id, request in attempts.items():
                assert (request.router, request.request_id) == (router, request_id)
                assert self._by_id[request.work.request_id] is request


def _trace_prompt(span: Span, info: FirstTokenInfo, at: float) -> None:
    started_at = at - info.prefill_s
    span.child("queue", at=started_at - info.queue_s).end(at=started_at)
    compute = span.child("compute", at=started_at)
    compute.set({"baton.cached_tokens": info.cached_tokens})
    compute.end(at=at)


def prefill_report(request: AttemptEntry, info: FirstTokenInfo) -> PrefillReport:
    """Return the message that reports a finished prompt (`info`) to its router: the times in the queue and of the
    computation, and the numbers of cached and pulled tokens.
    """
    cached: dict[Tier, int] = {"device": info.cached_tokens - info.host_tokens}
    if info.host_tokens:
        cached["host"] = info.host_tokens
    return PrefillReport(
        request_id=request.request_id,
        queue_s=info.queue_s,
        prefill_s=info.prefill_s,
        cached_tokens=cached,
        pulled_tokens=request.pulled.num_tokens if request.pulled is not None else 0,
        pulled_from=request.pulled.source if request.pulled is not None else None,
        pull_s=request.pulled.seconds if request.pulled is not None else 0.0,
        failed_encoders=request.failed_encoders,
        prompt_logprobs=None if info.prompt_logprobs is None else encode_logprobs(info.prompt_logprobs),
    )


def tokens_of(request: AttemptEntry, output: SequenceOutput) -> Tokens:
    """Return the message that reports new tokens of one sequence (`output`) to the router."""
    return Tokens(
        request_id=request.request_id,
        sequence=output.sequence,
        position=output.position,
        token_ids=output.token_ids,
        logprobs=output.logprobs,
        finish_reason=output.finish_reason,
        stop_token_id=output.stop_token_id,
    )

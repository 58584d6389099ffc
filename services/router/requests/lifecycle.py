"""One prompt's life in the cluster: placed, answered, and placed again when an instance is lost.

The client sees one unbroken stream: each sequence knows the tokens it has, and a replay asks for the rest with prompt
and tokens as its input. Every attempt has a request id of its own, so answers to one that was given up reach nobody.
However a flight ends, every instance that works for it is told.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from baton_serve.contracts.identity import BlockHash, InstanceId, RequestId
from baton_serve.contracts.messages import Answer, Failed, HandoffReport, PrefillReport, TokenLogprobs, Tokens, Work
from baton_serve.contracts.wire import WireError
from baton_serve.services.router.cluster.cluster import Cluster
from baton_serve.services.router.cluster.worker_state import WorkerState
from baton_serve.services.router.placement.policy import Candidate, Demand, NoCapacity, Placement, place
from baton_serve.services.router.protocol.errors import (
    ApiError,
    BadRequestError,
    DeadlineError,
    InternalError,
    UnavailableError,
)
from baton_serve.services.router.requests.attempt import Attempt, sequence_indexes
from baton_serve.services.router.requests.first_token_pacer import FirstTokenPacer
from baton_serve.services.router.requests.placement_retry import PlacementRetry, failure_error, no_capacity_error
from baton_serve.services.router.requests.prompt_request import (
    PromptBlockHashes,
    PromptRequest,
    RequestPolicy,
    RequestTiming,
)
from baton_serve.services.router.requests.timeline import Timeline
from baton_serve.services.router.requests.token_queue import TokenQueue
from baton_serve.services.router.text.token_sequence import TokenSequence

logger = logging.getLogger(__name__)

_BACKOFF_S = 0.05


class LifecycleOwner(Protocol):
    """The dispatcher."""

    def admit_request(self, lifecycle: "RequestLifecycle", placement: Placement) -> bool:
        """False: it waits until the owner calls `resume`. Raises `ApiError`."""

    def on_prefill_done(self, lifecycle: "RequestLifecycle") -> None:
        """An instance has less to compute."""

    def take_retry(self) -> bool: ...

    def on_end(self, lifecycle: "RequestLifecycle") -> None: ...


class RequestLifecycle:
    def __init__(
        self,
        request: PromptRequest,
        *,
        cluster: Cluster,
        token_queue: TokenQueue,
        rules: RequestPolicy,
        clock: Callable[[], float],
        timing: RequestTiming,
        owner: LifecycleOwner,
    ) -> None:
        self.request = request
        self.timeline = Timeline(arrived_at=timing.at, tokenize_s=timing.tokenize_s)
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.sequences = [TokenSequence(i) for i in range(request.num_sequences)]
        self.error: ApiError | None = None
        self.is_finished = False
        self._cluster = cluster
        self._pacer = FirstTokenPacer(
            token_queue, self.timeline, timing, rules, first_choice=request.first_choice, clock=clock
        )
        self._rules = rules
        self._owner = owner
        self.timing = timing
        self._clock = clock
        self.deadline = timing.at + rules.request_timeout_s
        """After it the owner calls `expire`."""
        self._attempts: set[Attempt] = set()
        self._num_attempts = 0
        self._avoided: frozenset[InstanceId] = frozenset()
        self._preferred_decode: InstanceId | None = None
        self._block_hashes = PromptBlockHashes(request.token_ids, request.cache_salt, request.lora, request.media)
        self._placement_retry: PlacementRetry | None = None
        self._replay_timers: list[asyncio.TimerHandle] = []

    @property
    def num_generated(self) -> int:
        """Tokens, of all sequences."""
        return sum([len(sequence.token_ids) for sequence in self.sequences])

    def start(self) -> None:
        """Raises `ApiError` when no instance can take it, or its owner refuses it. After any exception it is over, and
        no instance works for it."""
        try:
            no_capacity = self._start_attempt(self.sequences, 0)
            if no_capacity is not None:
                if no_capacity.reason != "empty_pool" or not self._expects_instances():
                    raise no_capacity_error(no_capacity)
                self._wait_for_instances(self.sequences, 0, no_capacity)
        except BaseException:
            self.is_finished = True
            self._release_local()
            raise

    def resume(self) -> None:
        """After it was not admitted: asks again."""
        self._place_again(self.sequences, 0)

    def stop_sequence(self, index: int) -> None:
        """Enough of this sequence: its text has ended."""
        sequence = self.sequences[index]
        if sequence.is_finished:
            return
        sequence.is_finished = True
        for attempt in [a for a in self._attempts if index in a.sequences]:
            if attempt.unfinished():
                attempt.cancel_sequence(index)
            else:
                self._end_attempt(attempt, cancel=True)
        self._end_if_done("stop")

    def cancel(self, reason: str) -> None:
        """Nobody wants the rest."""
        if not self.is_finished:
            self.timeline.finish_reasons += ["abort" for s in self.sequences if not s.is_finished]
            self._end(reason)

    def on_tokens(self, attempt: Attempt, worker: WorkerState, message: Tokens, now: float) -> None:
        sequence = attempt.sequences.get(message.sequence)
        if sequence is None:
            return
        is_from_decode = worker is attempt.decode
        if is_from_decode:
            attempt.decode_has_blocks = True
            if attempt.first_token_at:
                attempt.on_second_token(sequence.index, now)
        if updates := sequence.accept(message):
            if is_from_decode:
                self._pacer.put(sequence, updates, now)
            else:
                self._pacer.put_first_token(attempt, sequence, updates, now)
        if sequence.is_finished and not attempt.unfinished():
            # An end that decode itself wrote is known there; one that came with the first token may not be.
            self._end_attempt(attempt, cancel=worker is not attempt.decode)
            self._end_if_done(None)

    def on_answer(self, attempt: Attempt, worker: WorkerState, answer: Answer) -> None:
        match answer:
            case PrefillReport():
                worker.on_prefill_done(attempt.request_id)
                worker.circuit_breaker.succeeded()
                self._owner.on_prefill_done(self)
                if self.timeline.report is None:
                    self.timeline.report = answer
                    self.prompt_logprobs = answer.prompt_logprobs
            case HandoffReport():
                self.timeline.handoff = answer
                worker.circuit_breaker.succeeded()
                attempt.decode_has_blocks = True
            case Failed():
                self._on_failed(attempt, worker, answer)

    def on_lost(self, attempt: Attempt, worker: WorkerState, reason: str) -> None:
        if worker is attempt.prefill and worker is not attempt.decode and not attempt.needs_prefill:
            attempt.prefill_left()
            return
        error = UnavailableError(f"instance {worker.record.instance} was lost: {reason}", code="instance_lost")
        self._preferred_decode = _surviving_decode(attempt, worker.record.instance)
        self._replay(attempt, error, delay_s=0.0)

    def on_error(self, error: Exception) -> None:
        """An error of this router: the request fails alone."""
        logger.error("the request fails", exc_info=error, extra={"request_id": self.request.request_id})
        self.fail(InternalError("an internal error has been logged"))

    def _on_failed(self, attempt: Attempt, worker: WorkerState, failed: Failed) -> None:
        if worker is attempt.prefill and worker is not attempt.decode and not attempt.needs_prefill:
            return
        instance = worker.record.instance
        extra = {"request_id": attempt.request_id}
        logger.warning("%s failed: %s: %s", instance, failed.code, failed.message, extra=extra)
        if failed.code in ("invalid", "too_long"):
            self.fail(BadRequestError(failed.message, code=failed.code))
            return
        culprit = failed.lost if failed.lost is not None else instance
        is_first = culprit not in self._avoided
        self._avoided |= {culprit}
        self._preferred_decode = _surviving_decode(attempt, culprit)
        if failed.code == "draining" and is_first:
            # Nobody's fault, and known to placement from now on.
            self._replay(attempt, failure_error(failed), delay_s=0.0, is_counted=False)
            return
        self._blame(culprit, failed)
        if failed.code in ("overloaded", "internal") and not self._owner.take_retry():
            self._end_attempt(attempt, cancel=True)
            self.fail(failure_error(failed))
            return
        delay_s = _BACKOFF_S * 2**attempt.replays if failed.code in ("overloaded", "internal") else 0.0
        self._replay(attempt, failure_error(failed), delay_s=delay_s)

    def _blame(self, culprit: InstanceId, failed: Failed) -> None:
        """An instance that is merely full is not broken."""
        blamed = self._cluster.worker(culprit)
        if blamed is not None and failed.code in ("internal", "timeout", "handoff_failed"):
            blamed.circuit_breaker.failed(self._clock())

    def _replay(self, attempt: Attempt, error: ApiError, *, delay_s: float, is_counted: bool = True) -> None:
        """Places what is missing of an attempt again."""
        self._end_attempt(attempt, cancel=True)
        self._pacer.release()
        unfinished = attempt.unfinished()
        if not unfinished:
            self._end_if_done(None)
            return
        if is_counted and attempt.replays >= self._rules.max_replays:
            self.fail(error)
            return
        self.timeline.replays += 1
        replays = attempt.replays + is_counted
        logger.warning("replayed: %s", error.message, extra={"request_id": attempt.request_id})
        fresh = [sequence for sequence in unfinished if not sequence.token_ids]
        groups = ([fresh] if fresh else []) + [[sequence] for sequence in unfinished if sequence.token_ids]
        for sequence in unfinished:
            sequence.drop_out_of_order()
        for group in groups:
            # Later in any case: this may be called in the middle of the loss of an instance.
            self._replay_timers.append(
                asyncio.get_running_loop().call_later(delay_s, self._place_again, group, replays)
            )

    def _place_again(self, group: list[TokenSequence], replays: int) -> None:
        unfinished = [sequence for sequence in group if not sequence.is_finished]
        if self.is_finished or not unfinished:
            return
        try:
            self._launch_or_wait(unfinished, replays)
        except ApiError as exc:
            self.fail(exc)
        except Exception as exc:  # noqa: BLE001 - called by timers and listeners that serve other requests too
            self.on_error(exc)

    def _launch_or_wait(self, unfinished: list[TokenSequence], replays: int) -> None:
        no_capacity = self._start_attempt(unfinished, replays)
        if no_capacity is None:
            return
        # A stream that has begun waits for whatever may come; one that has not, for instances that are expected.
        if no_capacity.reason == "never_fits" or not (replays or self._expects_instances()):
            raise no_capacity_error(no_capacity)
        self._wait_for_instances(unfinished, replays, no_capacity)

    def _wait_for_instances(self, group: list[TokenSequence], replays: int, no_capacity: NoCapacity) -> None:
        """Until the cluster changes for the better, or for too long."""
        if self._placement_retry is None:
            self._placement_retry = PlacementRetry(
                self._cluster,
                wait_s=self._rules.instance_wait_s,
                place_again=self._place_again,
                give_up=lambda no_capacity: self.fail(no_capacity_error(no_capacity)),
            )
        self._placement_retry.add(group, replays, no_capacity)

    def _expects_instances(self) -> bool:
        return self._cluster.expects_instances(within_s=self._rules.instance_wait_s)

    def _start_attempt(self, sequences: Sequence[TokenSequence], replays: int) -> NoCapacity | None:
        """Places sequences that have the same tokens so far: one of them, or several that have none."""
        token_ids = self.request.token_ids + sequences[0].token_ids
        num_generated_before = len(sequences[0].token_ids)
        block_hashes = self._block_hashes.extended(token_ids) if num_generated_before else self._block_hashes
        demand = Demand(
            num_tokens=len(token_ids),
            num_sequences=len(sequences),
            max_new_tokens=self.request.sampling.max_tokens - num_generated_before,
            avoided=self._avoided,
            preferred_decode=self._preferred_decode,
            itl_s=self.timing.slo.itl_s,
            ttft_s=self.timing.ttft_budget_s(self._clock()),
            has_images=bool(self.request.media),
        )
        view = self._cluster.view(
            block_hashes.hashes, self.request.model, self.request.lora, has_images=demand.has_images
        )
        placement = place(demand, view, self._rules.policy)
        if isinstance(placement, NoCapacity):
            return placement
        if not self._num_attempts and not self._owner.admit_request(self, placement):
            return None
        attempt = self._new_attempt(placement, sequences, position=num_generated_before, replays=replays)
        try:
            self._begin(attempt, placement, token_ids, block_hashes)
        except BaseException as exc:
            self._end_attempt(attempt, cancel=bool(attempt.leases))
            if isinstance(exc, WireError):
                raise BadRequestError(f"the request cannot be sent to an instance: {exc}", code="unsendable") from exc
            raise
        return None

    def _begin(
        self, attempt: Attempt, placement: Placement, token_ids: list[int], block_hashes: PromptBlockHashes
    ) -> None:
        """Sends an attempt to its instances. The caller ends it if this raises."""
        self.timeline.record_placement(placement, self._clock())
        sequences = list(attempt.sequences.values())
        work = self._work(
            attempt, token_ids, sequence_indexes(sequences), block_hashes.root(placement.final_worker.layout)
        )
        timeout_s, plan = min(self._rules.handoff_timeout_s, work.timeout_s), placement.final_worker.pull
        source = self._cluster.worker(plan.source) if plan is not None else None
        attempt.start(
            work, placement, block_hashes, handoff_timeout_s=timeout_s, pull_from=source, images=self.request.images
        )
        for worker in attempt.workers():
            self._record_sent(worker, block_hashes.hashes(worker.record.layout))

    def _record_sent(self, worker: WorkerState, hashes: Sequence[BlockHash]) -> None:
        now = self._clock()
        worker.circuit_breaker.begin_attempt(now)
        self._cluster.index.expect(worker.record.instance, hashes, until=now + self._rules.expected_blocks_ttl_s)

    def _new_attempt(
        self, placement: Placement, sequences: Sequence[TokenSequence], *, position: int, replays: int
    ) -> Attempt:
        prefill = self._worker_of(placement.prefill)
        attempt = Attempt(
            owner=self,
            request_id=RequestId(f"{self.request.request_id}~{self._num_attempts}"),
            sequences={sequence.index: sequence for sequence in sequences},
            prefill=prefill,
            decode=self._worker_of(placement.decode),
            position=position,
            replays=replays,
            decode_has_blocks=prefill is None,
        )
        self._num_attempts += 1
        self._attempts.add(attempt)
        return attempt

    def _worker_of(self, candidate: Candidate | None) -> WorkerState | None:
        return self._cluster.worker(candidate.instance) if candidate is not None else None

    def _work(self, attempt: Attempt, token_ids: list[int], sequences: list[int], root: BlockHash) -> Work:
        """`root` of the instance that reads the prompt: one of another layout names blocks in its own way."""
        sampling = self.request.sampling
        if self.prompt_logprobs is not None:
            # They have come already: a replay need not compute them again.
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return Work(
            request_id=attempt.request_id,
            token_ids=token_ids,
            num_prompt_tokens=len(self.request.token_ids),
            sampling=sampling,
            root=root,
            sequences=sequences,
            priority=self.request.priority,
            lora=self.request.lora,
            media=list(self.request.media),
            timeout_s=max(0.1, self.deadline - self._clock()),
            itl_s=self.timing.slo.itl_s,
            trace_headers=dict(self.request.trace_headers),
        )

    def expire(self) -> None:
        self.fail(DeadlineError(f"the request was not done within {self._rules.request_timeout_s:g} s"))

    def fail(self, error: ApiError) -> None:
        """The client hears `error`, at once or after what it has got."""
        if not self.is_finished:
            self.error = error
            self.timeline.finish_reasons += ["error" for s in self.sequences if not s.is_finished]
            self._pacer.fail(error)
            self._end(error.message)

    def _end_attempt(self, attempt: Attempt, *, cancel: bool) -> None:
        if attempt in self._attempts:
            self._attempts.discard(attempt)
            attempt.end(cancel=cancel)

    def _end_if_done(self, finish_reason: str | None) -> None:
        if finish_reason is not None:
            self.timeline.finish_reasons.append(finish_reason)
        if not self.is_finished and all([sequence.is_finished for sequence in self.sequences]):
            self._end(None)

    def _end(self, reason: str | None) -> None:
        if reason is not None:
            logger.info("ends early: %s", reason, extra={"request_id": self.request.request_id})
        self.is_finished = True
        for attempt in list(self._attempts):
            self._end_attempt(attempt, cancel=True)
        self._release_local()
        self.timeline.ended_at = self._clock()
        self._owner.on_end(self)

    def _release_local(self) -> None:
        for timer in self._replay_timers:
            timer.cancel()
        self._replay_timers.clear()
        self._pacer.discard()
        if self._placement_retry is not None:
            self._placement_retry.end()
            self._placement_retry = None


def _surviving_decode(attempt: Attempt, culprit: InstanceId) -> InstanceId | None:
    """The decode instance, when it is not to blame: it keeps the blocks that have arrived there."""
    decode = attempt.decode
    return decode.record.instance if decode is not None and decode.record.instance != culprit else None

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

from baton_serve.contracts.identity import BlockName, InstanceId, RequestId
from baton_serve.contracts.messages import Answer, Failed, HandoffReport, PrefillReport, TokenLogprobs, Tokens, Work
from baton_serve.contracts.wire import WireError
from baton_serve.services.router.cluster.cluster import Cluster
from baton_serve.services.router.cluster.worker_state import Member
from baton_serve.services.router.placement.policy import Candidate, Demand, NoCapacity, Placement, place
from baton_serve.services.router.protocol.errors import (
    ApiError,
    BadRequestError,
    DeadlineError,
    InternalError,
    UnavailableError,
)
from baton_serve.services.router.requests.attempt import Attempt, indexes
from baton_serve.services.router.requests.first_token_pacer import Delivery
from baton_serve.services.router.requests.placement_errors import failure, no_capacity
from baton_serve.services.router.requests.placement_retry import Patience
from baton_serve.services.router.requests.prompt_request import Arrival, FlightRules, Job, PromptNames
from baton_serve.services.router.requests.timeline import Timeline
from baton_serve.services.router.requests.token_queue import Outbox
from baton_serve.services.router.text.token_sequence import TokenSequence

logger = logging.getLogger(__name__)

_BACKOFF_S = 0.05


class Owner(Protocol):
    """The dispatcher."""

    def admits(self, flight: "Flight", placement: Placement) -> bool:
        """False: it waits until the owner calls `resume`. Raises `ApiError`."""

    def prefilled(self, flight: "Flight") -> None:
        """An instance has less to compute."""

    def allows_retry(self) -> bool: ...

    def ended(self, flight: "Flight") -> None: ...


class Flight:
    def __init__(
        self,
        job: Job,
        *,
        cluster: Cluster,
        outbox: Outbox,
        rules: FlightRules,
        clock: Callable[[], float],
        arrival: Arrival,
        owner: Owner,
    ) -> None:
        self.job = job
        self.timeline = Timeline(arrived_at=arrival.at, tokenize_s=arrival.tokenize_s)
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.sequences = [TokenSequence(i) for i in range(job.num_sequences)]
        self.error: ApiError | None = None
        self.is_over = False
        self._cluster = cluster
        self._delivery = Delivery(outbox, self.timeline, arrival, rules, first_choice=job.first_choice, clock=clock)
        self._rules = rules
        self._owner = owner
        self.arrival = arrival
        self._clock = clock
        self.deadline = arrival.at + rules.request_timeout_s
        """After it the owner calls `expire`."""
        self._attempts: set[Attempt] = set()
        self._num_attempts = 0
        self._avoid: frozenset[InstanceId] = frozenset()
        self._keep_decode: InstanceId | None = None
        self._naming = PromptNames(job.token_ids, job.cache_salt, job.lora, job.media)
        self._patience: Patience | None = None
        self._timers: list[asyncio.TimerHandle] = []

    @property
    def num_generated(self) -> int:
        """Tokens, of all sequences."""
        return sum([len(sequence.token_ids) for sequence in self.sequences])

    def start(self) -> None:
        """Raises `ApiError` when no instance can take it, or its owner refuses it. After any exception it is over, and
        no instance works for it."""
        try:
            refused = self._launch(self.sequences, 0)
            if refused is not None:
                if refused.reason != "empty_pool" or not self._awaits_instances():
                    raise no_capacity(refused)
                self._wait(self.sequences, 0, refused)
        except BaseException:
            self.is_over = True
            self._clear()
            raise

    def resume(self) -> None:
        """After it was not admitted: asks again."""
        self._relaunch(self.sequences, 0)

    def stop(self, index: int) -> None:
        """Enough of this sequence: its text has ended."""
        sequence = self.sequences[index]
        if sequence.is_finished:
            return
        sequence.is_finished = True
        for attempt in [a for a in self._attempts if index in a.sequences]:
            if attempt.live():
                attempt.cancel_sequence(index)
            else:
                self._end_attempt(attempt, cancel=True)
        self._end_if_done("stop")

    def cancel(self, reason: str) -> None:
        """Nobody wants the rest."""
        if not self.is_over:
            self.timeline.finish_reasons += ["abort" for s in self.sequences if not s.is_finished]
            self._end(reason)

    def on_tokens(self, attempt: Attempt, member: Member, message: Tokens, now: float) -> None:
        sequence = attempt.sequences.get(message.sequence)
        if sequence is None:
            return
        is_from_decode = member is attempt.decode
        if is_from_decode:
            attempt.decode_has_blocks = True
            if attempt.first_at:
                attempt.second_came(sequence.index, now)
        if news := sequence.accept(message):
            if is_from_decode:
                self._delivery.put(sequence, news, now)
            else:
                self._delivery.put_first(attempt, sequence, news, now)
        if sequence.is_finished and not attempt.live():
            # An end that decode itself wrote is known there; one that came with the first token may not be.
            self._end_attempt(attempt, cancel=member is not attempt.decode)
            self._end_if_done(None)

    def on_answer(self, attempt: Attempt, member: Member, answer: Answer) -> None:
        match answer:
            case PrefillReport():
                member.prefilled(attempt.request_id)
                member.circuit.succeeded()
                self._owner.prefilled(self)
                if self.timeline.report is None:
                    self.timeline.report = answer
                    self.prompt_logprobs = answer.prompt_logprobs
            case HandoffReport():
                self.timeline.handoff = answer
                member.circuit.succeeded()
                attempt.decode_has_blocks = True
            case Failed():
                self._on_failed(attempt, member, answer)

    def on_lost(self, attempt: Attempt, member: Member, reason: str) -> None:
        if member is attempt.prefill and member is not attempt.decode and not attempt.needs_prefill:
            attempt.prefill_left()
            return
        error = UnavailableError(f"instance {member.record.instance} was lost: {reason}", code="instance_lost")
        self._keep_decode = _other(attempt, member.record.instance)
        self._replay(attempt, error, delay_s=0.0)

    def on_error(self, error: Exception) -> None:
        """An error of this router: the request fails alone."""
        logger.error("the request fails", exc_info=error, extra={"request_id": self.job.request_id})
        self.fail(InternalError("an internal error has been logged"))

    def _on_failed(self, attempt: Attempt, member: Member, failed: Failed) -> None:
        if member is attempt.prefill and member is not attempt.decode and not attempt.needs_prefill:
            return
        instance = member.record.instance
        extra = {"request_id": attempt.request_id}
        logger.warning("%s failed: %s: %s", instance, failed.code, failed.message, extra=extra)
        if failed.code in ("invalid", "too_long"):
            self.fail(BadRequestError(failed.message, code=failed.code))
            return
        culprit = failed.lost if failed.lost is not None else instance
        is_first = culprit not in self._avoid
        self._avoid |= {culprit}
        self._keep_decode = _other(attempt, culprit)
        if failed.code == "draining" and is_first:
            # Nobody's fault, and known to placement from now on.
            self._replay(attempt, failure(failed), delay_s=0.0, is_counted=False)
            return
        self._blame(culprit, failed)
        if failed.code in ("overloaded", "internal") and not self._owner.allows_retry():
            self._end_attempt(attempt, cancel=True)
            self.fail(failure(failed))
            return
        delay_s = _BACKOFF_S * 2**attempt.replays if failed.code in ("overloaded", "internal") else 0.0
        self._replay(attempt, failure(failed), delay_s=delay_s)

    def _blame(self, culprit: InstanceId, failed: Failed) -> None:
        """An instance that is merely full is not broken."""
        blamed = self._cluster.member(culprit)
        if blamed is not None and failed.code in ("internal", "timeout", "handoff_failed"):
            blamed.circuit.failed(self._clock())

    def _replay(self, attempt: Attempt, error: ApiError, *, delay_s: float, is_counted: bool = True) -> None:
        """Places what is missing of an attempt again."""
        self._end_attempt(attempt, cancel=True)
        self._delivery.release()
        live = attempt.live()
        if not live:
            self._end_if_done(None)
            return
        if is_counted and attempt.replays >= self._rules.max_replays:
            self.fail(error)
            return
        self.timeline.replays += 1
        replays = attempt.replays + is_counted
        logger.warning("replayed: %s", error.message, extra={"request_id": attempt.request_id})
        fresh = [sequence for sequence in live if not sequence.token_ids]
        groups = ([fresh] if fresh else []) + [[sequence] for sequence in live if sequence.token_ids]
        for sequence in live:
            sequence.forget_early()
        for group in groups:
            # Later in any case: this may be called in the middle of the loss of an instance.
            self._timers.append(asyncio.get_running_loop().call_later(delay_s, self._relaunch, group, replays))

    def _relaunch(self, group: list[TokenSequence], replays: int) -> None:
        live = [sequence for sequence in group if not sequence.is_finished]
        if self.is_over or not live:
            return
        try:
            self._launch_or_wait(live, replays)
        except ApiError as exc:
            self.fail(exc)
        except Exception as exc:  # noqa: BLE001 - called by timers and listeners that serve other requests too
            self.on_error(exc)

    def _launch_or_wait(self, live: list[TokenSequence], replays: int) -> None:
        refused = self._launch(live, replays)
        if refused is None:
            return
        # A stream that has begun waits for whatever may come; one that has not, for instances that are expected.
        if refused.reason == "never_fits" or not (replays or self._awaits_instances()):
            raise no_capacity(refused)
        self._wait(live, replays, refused)

    def _wait(self, group: list[TokenSequence], replays: int, refused: NoCapacity) -> None:
        """Until the cluster changes for the better, or for too long."""
        if self._patience is None:
            self._patience = Patience(
                self._cluster,
                wait_s=self._rules.instance_wait_s,
                relaunch=self._relaunch,
                give_up=lambda refused: self.fail(no_capacity(refused)),
            )
        self._patience.wait(group, replays, refused)

    def _awaits_instances(self) -> bool:
        return self._cluster.awaits_instances(within_s=self._rules.instance_wait_s)

    def _launch(self, sequences: Sequence[TokenSequence], replays: int) -> NoCapacity | None:
        """Places sequences that have the same tokens so far: one of them, or several that have none."""
        token_ids = self.job.token_ids + sequences[0].token_ids
        num_written = len(sequences[0].token_ids)
        naming = self._naming.longer(token_ids) if num_written else self._naming
        demand = Demand(
            num_tokens=len(token_ids),
            num_sequences=len(sequences),
            max_new_tokens=self.job.sampling.max_tokens - num_written,
            avoid=self._avoid,
            keep_decode=self._keep_decode,
            itl_s=self.arrival.slo.itl_s,
            ttft_s=self.arrival.ttft_left_s(self._clock()),
            has_images=bool(self.job.media),
        )
        view = self._cluster.view(naming.names, self.job.model, self.job.lora, has_images=demand.has_images)
        placement = place(demand, view, self._rules.policy)
        if isinstance(placement, NoCapacity):
            return placement
        if not self._num_attempts and not self._owner.admits(self, placement):
            return None
        attempt = self._attempt(placement, sequences, position=num_written, replays=replays)
        try:
            self._begin(attempt, placement, token_ids, naming)
        except BaseException as exc:
            self._end_attempt(attempt, cancel=bool(attempt.leases))
            if isinstance(exc, WireError):
                raise BadRequestError(f"the request cannot be sent to an instance: {exc}", code="unsendable") from exc
            raise
        return None

    def _begin(self, attempt: Attempt, placement: Placement, token_ids: list[int], naming: PromptNames) -> None:
        """Sends an attempt to its instances. The caller ends it if this raises."""
        self.timeline.placed(placement, self._clock())
        sequences = list(attempt.sequences.values())
        work = self._work(attempt, token_ids, indexes(sequences), naming.root(placement.computing.layout))
        timeout_s, plan = min(self._rules.handoff_timeout_s, work.timeout_s), placement.computing.pull
        source = self._cluster.member(plan.source) if plan is not None else None
        attempt.start(work, placement, naming, handoff_timeout_s=timeout_s, pull_from=source, images=self.job.images)
        for member in attempt.members():
            self._expect(member, naming.names(member.record.layout))

    def _expect(self, member: Member, names: Sequence[BlockName]) -> None:
        now = self._clock()
        member.circuit.tries(now)
        self._cluster.index.expect(member.record.instance, names, until=now + self._rules.expected_blocks_ttl_s)

    def _attempt(
        self, placement: Placement, sequences: Sequence[TokenSequence], *, position: int, replays: int
    ) -> Attempt:
        prefill = self._member_of(placement.prefill)
        attempt = Attempt(
            owner=self,
            request_id=RequestId(f"{self.job.request_id}~{self._num_attempts}"),
            sequences={sequence.index: sequence for sequence in sequences},
            prefill=prefill,
            decode=self._member_of(placement.decode),
            position=position,
            replays=replays,
            decode_has_blocks=prefill is None,
        )
        self._num_attempts += 1
        self._attempts.add(attempt)
        return attempt

    def _member_of(self, candidate: Candidate | None) -> Member | None:
        return self._cluster.member(candidate.instance) if candidate is not None else None

    def _work(self, attempt: Attempt, token_ids: list[int], sequences: list[int], root: BlockName) -> Work:
        """`root` of the instance that reads the prompt: one of another layout names blocks in its own way."""
        sampling = self.job.sampling
        if self.prompt_logprobs is not None:
            # They have come already: a replay need not compute them again.
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return Work(
            request_id=attempt.request_id,
            token_ids=token_ids,
            num_prompt_tokens=len(self.job.token_ids),
            sampling=sampling,
            root=root,
            sequences=sequences,
            priority=self.job.priority,
            lora=self.job.lora,
            media=list(self.job.media),
            timeout_s=max(0.1, self.deadline - self._clock()),
            itl_s=self.arrival.slo.itl_s,
            trace_headers=dict(self.job.trace_headers),
        )

    def expire(self) -> None:
        self.fail(DeadlineError(f"the request was not done within {self._rules.request_timeout_s:g} s"))

    def fail(self, error: ApiError) -> None:
        """The client hears `error`, at once or after what it has got."""
        if not self.is_over:
            self.error = error
            self.timeline.finish_reasons += ["error" for s in self.sequences if not s.is_finished]
            self._delivery.fail(error)
            self._end(error.message)

    def _end_attempt(self, attempt: Attempt, *, cancel: bool) -> None:
        if attempt in self._attempts:
            self._attempts.discard(attempt)
            attempt.end(cancel=cancel)

    def _end_if_done(self, finish_reason: str | None) -> None:
        if finish_reason is not None:
            self.timeline.finish_reasons.append(finish_reason)
        if not self.is_over and all([sequence.is_finished for sequence in self.sequences]):
            self._end(None)

    def _end(self, reason: str | None) -> None:
        if reason is not None:
            logger.info("ends early: %s", reason, extra={"request_id": self.job.request_id})
        self.is_over = True
        for attempt in list(self._attempts):
            self._end_attempt(attempt, cancel=True)
        self._clear()
        self.timeline.ended_at = self._clock()
        self._owner.ended(self)

    def _clear(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._delivery.drop()
        if self._patience is not None:
            self._patience.end()
            self._patience = None


def _other(attempt: Attempt, culprit: InstanceId) -> InstanceId | None:
    """The decode instance, when it is not to blame: it keeps the blocks that have arrived there."""
    decode = attempt.decode
    return decode.record.instance if decode is not None and decode.record.instance != culprit else None

"""Decides what happens to one request when tokens, losses, failures, cancels or its deadline come: replay, finish
reason, error.

A request is served by *attempts*. An attempt is one placement of some of its sequences: the workers that compute them,
under a request id of its own. (A worker is one instance, a model replica with a role, as this router sees it:
`WorkerState`.) When a worker fails or is lost, its attempt ends and the unfinished sequences are placed again, with the
prompt and the tokens generated so far as input. The client sees one unbroken stream.

An answer carries the request id of its attempt, so a late answer to an ended attempt reaches no lifecycle. However the
request ends, each worker that may still compute it or hold its blocks is sent `Cancel`.

Everything here runs on the router's event loop.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from baton_serve.contracts.messages import (
    Answer,
    EncodedLogprobs,
    ErrorCode,
    Failed,
    HandoffReport,
    PrefillReport,
    Tokens,
)
from baton_serve.services.router.cluster.cluster import Cluster
from baton_serve.services.router.cluster.worker_state import WorkerState
from baton_serve.services.router.placement.policy import NoCapacity, Placement
from baton_serve.services.router.protocol.errors import (
    ApiError,
    BadRequestError,
    DeadlineError,
    InternalError,
    UnavailableError,
)
from baton_serve.services.router.requests.attempt import Attempt
from baton_serve.services.router.requests.first_token_pacer import FirstTokenPacer
from baton_serve.services.router.requests.placement_retry import PlacementRetry, failure_error, no_capacity_error
from baton_serve.services.router.requests.prompt_request import PromptRequest, RequestPolicy, RequestTiming
from baton_serve.services.router.requests.request_attempts import RequestAttempts
from baton_serve.services.router.requests.timeline import Timeline
from baton_serve.services.router.requests.token_queue import TokenQueue
from baton_serve.services.router.text.token_sequence import TokenSequence

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.05
"""Delay before the first replay of an `overloaded` or `internal` failure; each further replay waits twice as long."""


class LifecycleOwner(Protocol):
    """Decides when requests may be sent to instances, and is notified of their progress. `Dispatcher` implements it,
    which cannot be imported here because it imports this module.
    """

    def admit_or_queue(self, lifecycle: "RequestLifecycle", placement: Placement) -> bool:
        """Return whether the request may be sent to the instances of `placement` now.

        If not, the owner has put it into its waiting queue and calls `resume` later. Raises `ApiError` to reject the
        request.
        """

    def on_prefill_done(self, lifecycle: "RequestLifecycle") -> None:
        """Send waiting requests that may go now: an instance has computed this request's prompt, so it has fewer prompt
        tokens left.
        """

    def on_handoff_due(self) -> None:
        """Count a request whose placement needs a KV handoff."""

    def on_handoff_completed(self) -> None:
        """Count a KV handoff whose blocks have all arrived."""

    def take_retry(self) -> bool:
        """Take one retry from the budget that all requests share. Return False if the budget is used up."""
        ...

    def on_end(self, lifecycle: "RequestLifecycle") -> None:
        """Forget the request, which has ended. It is called once for each request whose `start` has returned."""


class RequestLifecycle:
    """Follows one prompt of an API call from its placement to its end, with one or several (`n`) generated sequences. A
    `Dispatcher` starts and owns it.
    """

    def __init__(
        self,
        request: PromptRequest,
        *,
        cluster: Cluster,
        token_queue: TokenQueue,
        policy: RequestPolicy,
        clock: Callable[[], float],
        timing: RequestTiming,
        owner: LifecycleOwner,
    ) -> None:
        self.request = request
        self.timeline = Timeline(arrived_at=timing.at, tokenize_s=timing.tokenize_s)
        self.prompt_logprobs: EncodedLogprobs | None = None
        self.sequences = [TokenSequence(i) for i in range(request.num_sequences)]
        self.error: ApiError | None = None
        self.is_finished = False
        self._cluster = cluster
        self._pacer = FirstTokenPacer(
            token_queue, self.timeline, timing, policy, first_choice=request.first_choice, clock=clock
        )
        self._policy = policy
        self._owner = owner
        self.timing = timing
        self._clock = clock
        self.deadline = timing.at + policy.request_timeout_s
        """Moment of `clock` after which the owner calls `expire`."""
        self._attempts = RequestAttempts(
            request,
            cluster=cluster,
            policy=policy,
            clock=clock,
            timing=timing,
        )
        self._placement_retry: PlacementRetry | None = None
        self._replay_timers: list[asyncio.TimerHandle] = []

    @property
    def num_generated(self) -> int:
        """The number of tokens generated so far, of all sequences together."""
        return sum([len(sequence.token_ids) for sequence in self.sequences])

    def start(self) -> None:
        """Choose instances and send the request to them, or leave it waiting.

        It waits in the owner's queue, or until an instance comes that is expected soon. Raises `ApiError` if no
        instance can serve it or if the owner rejects it. After any exception the request has ended, and no instance
        computes it.
        """
        try:
            no_capacity = self._start_attempt(self.sequences, 0)
            if no_capacity is not None:
                if no_capacity.reason != "empty_pool" or not self._expects_instances():
                    raise no_capacity_error(no_capacity)
                self._wait_for_instances(self.sequences, 0, no_capacity)
        except BaseException:
            # Not `fail`: the owner registers the request only when this method has returned, so `on_end` would refer
            # to a request that it does not know; and the caller still can answer with the error's HTTP status.
            self.is_finished = True
            self._release_local()
            raise

    def resume(self) -> None:
        """Choose instances again, and ask the owner again whether the request may be sent to them. The owner calls this
        for a request in its waiting queue.
        """
        self._place_again(self.sequences, 0)

    def stop_sequence(self, index: int) -> None:
        """End the sequence with this index before its last token, because its text is complete, for example at a stop
        string.
        """
        sequence = self.sequences[index]
        if sequence.is_finished:
            return
        sequence.is_finished = True
        for attempt in self._attempts.with_sequence(index):
            if attempt.unfinished():
                attempt.cancel_sequence(index)
            else:  # nothing of the attempt is needed any more
                self._attempts.end(attempt, cancel=True)
        self._end_if_done("stop")

    def cancel(self, reason: str) -> None:
        """End the request because its client will not read more tokens. `reason` goes to the log."""
        if not self.is_finished:
            self.timeline.finish_reasons += ["abort" for s in self.sequences if not s.is_finished]
            self._end(reason)

    def on_placed(self, placement: Placement) -> None:
        """Record in the timeline which instances were chosen, and count the KV handoff if one is needed."""
        self.timeline.record_placement(placement, self._clock())
        if placement.handoff_is_due:
            self._owner.on_handoff_due()

    def on_tokens(self, attempt: Attempt, worker: WorkerState, message: Tokens, now: float) -> None:
        """Pass new tokens of one sequence to the client. With the last token of a sequence, end the sequence, and the
        attempt and the request if nothing else of them runs. `now` is the time when the message arrived.
        """
        sequence = attempt.sequences.get(message.sequence)
        if sequence is None:
            return
        is_from_decode = worker is attempt.decode
        if is_from_decode:
            # With --handoff-fallback local, a decode worker computes a prompt that it failed to fetch, and sends no
            # `HandoffReport`. Its tokens show as well that the prefill worker is not needed any more.
            attempt.decode_has_blocks = True
            if attempt.first_token_at:
                attempt.on_second_token(sequence.index, now)
        # Around a handoff both workers may send the same token, or a later one first: `accept` returns what is next.
        if updates := sequence.accept(message):
            if is_from_decode:
                self._pacer.put(sequence, updates, now)
            else:
                self._pacer.put_first_token(attempt, sequence, updates, now)
        if sequence.is_finished and not attempt.unfinished():
            # A decode worker knows the end that it has generated itself. If the first token was the last one, it came
            # from the prefill worker, and the decode worker may still be waiting for the blocks: cancel it.
            self._attempts.end(attempt, cancel=worker is not attempt.decode)
            self._end_if_done(None)

    def on_answer(self, attempt: Attempt, worker: WorkerState, answer: Answer) -> None:
        """Handle an answer of an instance that has no tokens: a report on the prompt or the handoff, or a failure."""
        match answer:
            case PrefillReport():
                worker.on_prefill_done(attempt.request_id)
                worker.circuit_breaker.succeeded()
                self._attempts.on_encoded(attempt, answer.failed_encoders)
                self._owner.on_prefill_done(self)
                # A replay reports again. The first report explains the time to first token, and only that one has the
                # prompt's logprobs.
                if self.timeline.report is None:
                    self.timeline.report = answer
                    self.prompt_logprobs = answer.prompt_logprobs
            case HandoffReport():
                self.timeline.handoff = answer
                self._owner.on_handoff_completed()
                worker.circuit_breaker.succeeded()
                attempt.decode_has_blocks = True
            case Failed():
                self._on_failed(attempt, worker, answer)

    def on_lost(self, attempt: Attempt, worker: WorkerState, reason: str) -> None:
        """Place the sequences of an attempt again (a replay) after the connection to one of its instances was lost,
        unless the attempt does not need that instance any more.
        """
        if attempt.is_done_with(worker):
            attempt.drop_prefill()
            return
        error = UnavailableError(f"instance {worker.record.instance} was lost: {reason}", code="instance_lost")
        self._attempts.prefer_decode_of(attempt, culprit=worker.record.instance)
        self._replay(attempt, error, delay_s=0.0)

    def on_error(self, error: Exception) -> None:
        """Fail the request with status 500 after an error in the router's own code. The log has the traceback."""
        logger.error("internal error, the request fails", exc_info=error, extra={"request_id": self.request.request_id})
        self.fail(InternalError("internal error of the router; its log has the details"))

    def _on_failed(self, attempt: Attempt, worker: WorkerState, failed: Failed) -> None:
        """Replay an attempt that an instance gave up (`failed` has the reason), or fail the request if a replay cannot
        help.
        """
        if attempt.is_done_with(worker):
            return
        instance = worker.record.instance
        extra = {"request_id": attempt.request_id}
        logger.warning("instance %s gave up a request (%s): %s", instance, failed.code, failed.message, extra=extra)
        if failed.code in ("invalid", "too_long"):
            self.fail(BadRequestError(failed.message, code=failed.code))
            return
        if failed.code == "overloaded" and attempt.omits_images:
            # The instance works, but has evicted the KV of these images before it was used: send them.
            self._attempts.need_images(attempt)
            self._attempts.prefer_decode_of(attempt, culprit=instance)
            self._replay(attempt, failure_error(failed), delay_s=0.0, is_counted=False)
            return
        # A decode worker that could not fetch the blocks names the instance that it tried to fetch them from.
        culprit = failed.lost if failed.lost is not None else instance
        is_first_failure = self._attempts.avoid(culprit)
        self._attempts.prefer_decode_of(attempt, culprit=culprit)
        self._attempts.record_failure(culprit, failed.code)
        rule = replay_rule(failed.code, is_first_failure=is_first_failure, num_replays=attempt.num_replays)
        if rule.needs_budget and not self._owner.take_retry():
            self._attempts.end(attempt, cancel=True)
            self.fail(failure_error(failed))
            return
        self._replay(attempt, failure_error(failed), delay_s=rule.delay_s, is_counted=rule.is_counted)

    def _replay(self, attempt: Attempt, error: ApiError, *, delay_s: float, is_counted: bool = True) -> None:
        """End an attempt and place its unfinished sequences again after `delay_s` seconds, or fail the request with
        `error` if no replay is left. Without `is_counted` this replay does not count towards the limit.
        """
        self._attempts.end(attempt, cancel=True)
        self._pacer.flush()  # a first token that is held back would wait for a second one of the ended attempt
        unfinished = attempt.unfinished()
        if not unfinished:
            self._end_if_done(None)
            return
        if is_counted and attempt.num_replays >= self._policy.max_replays:
            self.fail(error)
            return
        self.timeline.replays += 1
        num_replays = attempt.num_replays + is_counted
        logger.warning("replaying a request: %s", error.message, extra={"request_id": attempt.request_id})
        groups = replay_groups(unfinished)
        for sequence in unfinished:
            sequence.drop_out_of_order()
        for group in groups:
            # By a timer even without delay: the cluster may be in the middle of removing the lost worker.
            timer = asyncio.get_running_loop().call_later(delay_s, self._place_again, group, num_replays)
            self._replay_timers.append(timer)

    def _place_again(self, group: list[TokenSequence], num_replays: int) -> None:
        """Choose instances for those sequences of a group that are still unfinished, or fail the request. Never
        raises.
        """
        unfinished = [sequence for sequence in group if not sequence.is_finished]
        if self.is_finished or not unfinished:
            return
        try:
            self._start_or_wait(unfinished, num_replays)
        except ApiError as exc:
            self.fail(exc)
        except Exception as exc:  # noqa: BLE001 - called by timers and listeners that serve other requests too
            self.on_error(exc)

    def _start_or_wait(self, unfinished: list[TokenSequence], num_replays: int) -> None:
        """Choose instances for the `unfinished` sequences and send them there. If none can take them, begin to wait: a
        change of the cluster tries again. `num_replays` is how often these sequences were replayed before. Raises
        `ApiError` if waiting is useless or the owner rejects the request.
        """
        no_capacity = self._start_attempt(unfinished, num_replays)
        if no_capacity is None:
            return
        # A replay waits for any instance that may come, since failing it breaks a stream that the client is reading. A
        # new request waits only if an instance is expected; without one its client should get the 503 immediately.
        # `num_replays` does not distinguish them: it leaves out replays away from draining instances.
        if no_capacity.reason == "never_fits" or not (self._attempts.has_started or self._expects_instances()):
            raise no_capacity_error(no_capacity)
        self._wait_for_instances(unfinished, num_replays, no_capacity)

    def _wait_for_instances(self, group: list[TokenSequence], num_replays: int, no_capacity: NoCapacity) -> None:
        """Try to place the group again whenever the cluster changes, and fail the request after `instance_wait_s`
        seconds. `no_capacity` is the reason why no instance can take it now.
        """
        if self._placement_retry is None:
            self._placement_retry = PlacementRetry(
                self._cluster,
                wait_s=self._policy.instance_wait_s,
                place_again=self._place_again,
                give_up=lambda no_capacity: self.fail(no_capacity_error(no_capacity)),
            )
        self._placement_retry.add(group, num_replays, no_capacity)

    def _expects_instances(self) -> bool:
        return self._cluster.expects_instances(within_s=self._policy.instance_wait_s)

    def _start_attempt(self, sequences: Sequence[TokenSequence], num_replays: int) -> NoCapacity | None:
        """Choose instances for sequences and send the sequences to them. Return the reason if no instance can take
        them; see `RequestAttempts.start`.
        """
        return self._attempts.start(
            sequences,
            owner=self,
            num_replays=num_replays,
            needs_prompt_logprobs=self.prompt_logprobs is None,
            admit=lambda placement: self._owner.admit_or_queue(self, placement),
        )

    def expire(self) -> None:
        """Fail the request with status 504. The owner calls this when the request's `deadline` has passed."""
        limit = f"{self._policy.request_timeout_s:g} s (--request-timeout-s of the router)"
        self.fail(DeadlineError(f"the request did not finish within {limit}; ask for fewer tokens"))

    def fail(self, error: ApiError) -> None:
        """End the request with an error. The client gets it after the tokens that have been generated."""
        if not self.is_finished:
            self.error = error
            self.timeline.finish_reasons += ["error" for s in self.sequences if not s.is_finished]
            self._pacer.fail(error)
            self._end(error.message)

    def _end_if_done(self, finish_reason: str | None) -> None:
        """End the request if all its sequences are finished. Record `finish_reason` for a sequence that the router has
        ended; None if the reason came with a token.
        """
        if finish_reason is not None:
            self.timeline.finish_reasons.append(finish_reason)
        if not self.is_finished and all([sequence.is_finished for sequence in self.sequences]):
            self._end(None)

    def _end(self, reason: str | None) -> None:
        """End the request and all its attempts. `reason` says why it ends early, or is None if it has been served
        completely.
        """
        if reason is not None:
            logger.info("request ended early: %s", reason, extra={"request_id": self.request.request_id})
        self.is_finished = True
        self._attempts.cancel_all()
        self._release_local()
        self.timeline.ended_at = self._clock()
        self._owner.on_end(self)

    def _release_local(self) -> None:
        """Stop all timers and listeners of the request in this router, and drop tokens that are held back."""
        for timer in self._replay_timers:
            timer.cancel()
        self._replay_timers.clear()
        self._pacer.discard()
        if self._placement_retry is not None:
            self._placement_retry.end()
            self._placement_retry = None


class ReplayRule(NamedTuple):
    """Says how an attempt that failed is replayed: whether the replay counts towards the limits, and after how many
    seconds it begins.
    """

    is_counted: bool
    """The replay counts towards `RequestPolicy.max_replays`."""
    needs_budget: bool
    """The replay needs a retry from the budget that all requests share."""
    delay_s: float


def replay_rule(code: ErrorCode, *, is_first_failure: bool, num_replays: int) -> ReplayRule:
    """Return how to replay an attempt that failed with the error `code`.

    `is_first_failure` says that the instance at fault has not failed this request before. `num_replays` counts earlier
    replays.
    """
    if code == "draining" and is_first_failure:
        # Draining is planned, and placement avoids the instance from now on. If this replay were counted, a rolling
        # update could use up `max_replays`.
        return ReplayRule(is_counted=False, needs_budget=False, delay_s=0.0)
    if code in ("overloaded", "internal"):
        # Replays add load. Without backoff and a shared budget they would keep an overloaded cluster overloaded.
        return ReplayRule(is_counted=True, needs_budget=True, delay_s=FIRST_BACKOFF_S * 2**num_replays)
    return ReplayRule(is_counted=True, needs_budget=False, delay_s=0.0)


def replay_groups(unfinished: Sequence[TokenSequence]) -> list[list[TokenSequence]]:
    """Split sequences into groups, each of which one attempt can continue.

    Sequences without tokens have the same input, the prompt, and form one group; every other sequence is a group by
    itself.
    """
    without_tokens = [sequence for sequence in unfinished if not sequence.token_ids]
    with_tokens = [[sequence] for sequence in unfinished if sequence.token_ids]
    return [without_tokens, *with_tokens] if without_tokens else with_tokens

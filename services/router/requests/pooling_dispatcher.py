"""Decides how the inputs of a pooling request are split over instances, sends them, retries failures, and encodes
vectors (`encoding_format`).

The inputs of one API call go in groups to the instances that are predicted to finish first, and are sent again if an
instance fails or is lost. However a call ends, every instance that still computes for it is sent `Cancel`.
"""

import asyncio
import logging
import sys
from array import array
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from operator import mul
from typing import Literal, TypeVar

import msgspec

from baton_serve.contracts.identity import InstanceId, RequestId
from baton_serve.contracts.messages import Answer, Cancel, Failed, Pool, Pooled
from baton_serve.contracts.pooling import PoolingInput, PoolingSpec
from baton_serve.services.common.tracing import Tracing
from baton_serve.services.router.cluster.cluster import Cluster
from baton_serve.services.router.cluster.routable import serves_model
from baton_serve.services.router.cluster.worker_state import LoadEstimate, WorkerState
from baton_serve.services.router.placement.block_index import Match
from baton_serve.services.router.placement.circuit_breaker import RetryBudget
from baton_serve.services.router.placement.policy import Candidate
from baton_serve.services.router.protocol.caller import ANONYMOUS, NO_SLO, Caller, Slo
from baton_serve.services.router.protocol.errors import (
    ApiError,
    BadRequestError,
    DeadlineError,
    RateLimitError,
    UnavailableError,
)
from baton_serve.services.router.requests.dispatcher import AdmissionControl
from baton_serve.services.router.requests.metrics import RouterMetrics
from baton_serve.services.router.requests.placement_retry import failure_error
from baton_serve.services.router.requests.pooling_admission import DispatchedTokens, PoolingAdmission, PoolingDemand
from baton_serve.services.router.requests.prompt_request import RequestPolicy

T = TypeVar("T")

_TURN_BYTES = 64 * 1024
"""Bytes of float32 numbers that are processed in one turn of the event loop.

Writing a number as JSON, or using it in a cosine, takes 0.1 to 0.2 µs, so one turn takes 1.6 to 3.3 ms.
"""


@dataclass(frozen=True, slots=True)
class Vector:
    """A vector or matrix that an instance has computed, such as an embedding. `data` are little-endian float32 numbers,
    row by row.
    """

    shape: Sequence[int]
    data: bytes

    def values(self) -> "array[float]":
        """Return all numbers row after row as an array of floats, which needs an eighth of the memory of `numbers`."""
        values = array("f", self.data)
        # An array has the byte order of this machine, the wire format is little-endian.
        if sys.byteorder == "big":
            values.byteswap()
        return values

    def numbers(self) -> list[float]:
        """Return all numbers row after row, as a list of Python floats."""
        return self.values().tolist()

    def rows(self) -> "list[Vector]":
        """Return the rows of a matrix, each as a vector."""
        width = 4 * self.shape[1]
        return [Vector(self.shape[1:], self.data[at : at + width]) for at in range(0, len(self.data), width)]

    def encode(self, encoding: Literal["float", "base64"]) -> bytes:
        """Return the JSON of a vector as a list of numbers, or of a vector or matrix as base64 text."""
        return msgspec.json.encode(b64encode(self.data).decode("ascii") if encoding == "base64" else self.numbers())


async def encode_vectors(vectors: Sequence[Vector], encoding: Literal["float", "base64"]) -> list[msgspec.Raw]:
    """Return the JSON of each vector, without blocking other requests.

    A request may have thousands of vectors with thousands of numbers each, so the event loop runs between them.
    """
    texts: list[msgspec.Raw] = []
    async for vector in yielding_iter(vectors, lambda vector: len(vector.data)):
        if encoding == "float" and len(vector.shape) == 2:
            rows = [row.encode(encoding) async for row in yielding_iter(vector.rows(), lambda row: len(row.data))]
            texts.append(msgspec.Raw(b"[" + b",".join(rows) + b"]"))
        else:
            texts.append(msgspec.Raw(vector.encode(encoding)))
    return texts


async def yielding_iter(items: Sequence[T], size: Callable[[T], int]) -> AsyncIterator[T]:
    """Iterate over `items`, and let other tasks run after each `_TURN_BYTES` bytes. `size` returns the number of bytes
    of an item.
    """
    done = 0
    for item in items:
        yield item
        done += size(item)
        if done >= _TURN_BYTES:
            done = 0
            await asyncio.sleep(0)


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the cosine similarity of two vectors, or 0 if one of them has only zeros."""
    lengths = sqrt(sum(map(mul, first, first)) * sum(map(mul, second, second)))
    return sum(map(mul, first, second)) / lengths if lengths else 0.0


logger = logging.getLogger(__name__)

MAX_GROUP_TOKENS = 8192
"""Largest number of tokens in one message to an instance, apart from a single longer input."""
MIN_GROUP_TOKENS = 512
"""Smallest number of tokens that is worth another instance."""
_BACKOFF_S = 0.05
"""Delay before the first retry; each further retry waits twice as long."""
_RETRY_AFTER_S = 1.0
"""Retry-After of errors whose cause has no predicted end."""
_NO_MATCH = Match()


class PoolingPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """The tokenized inputs of one pooling request, with its parameters and its caller."""

    request_id: str
    """Unique in the cluster."""
    inputs: Sequence[PoolingInput]
    params: PoolingSpec
    priority: int = 0
    caller: Caller = ANONYMOUS
    slo: Slo = NO_SLO
    """SLO of the request; its TTFT counts for the whole answer, which is sent in one piece."""
    trace_headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    model: frozenset[str] | None = None
    """Names of the model; None if the router serves only one."""
    images: Mapping[bytes, bytes] = msgspec.field(default_factory=dict)
    """The files of the images of all inputs, by digest."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all inputs together."""
        return sum(len(item.token_ids) for item in self.inputs)


class PoolingDispatcher:
    """Computes the pooling requests of one model on instances, each request in an asyncio task of its own. Use it on
    the event loop only.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        rules: RequestPolicy,
        admission: AdmissionControl,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        tracing: Tracing | None = None,
    ) -> None:
        self._cluster = cluster
        self._rules = rules
        self._admission = admission
        self._metrics = metrics
        self._clock = clock
        self._tasks: set[asyncio.Task[list[Vector]]] = set()
        self._shares = admission.shares()
        self._is_closed = False
        self._tracing = tracing or Tracing()
        self._pooling_admission = PoolingAdmission(admission, metrics, clock=clock)
        cluster.add_listener(self._pooling_admission.dispatch_waiting)

    async def vectors(self, prompts: PoolingPrompts, *, arrived_at: float) -> list[Vector]:
        """Compute one vector for each input on instances, and return them in the order of the inputs. `arrived_at` is
        the request's arrival on the router's monotonic clock.

        Raises `ApiError` if the request is rejected or fails. Cancelling this call ends the request.
        """
        num_places = self._count_against_limits(prompts)
        # No await in between: two requests must not both see the last free place.
        self._shares.add(prompts.caller.name, num_places)
        try:
            found = await self._in_task(prompts, arrived_at)
        finally:
            self._shares.remove(prompts.caller.name, num_places)
            # Its instances have less work now, so that waiting requests may go.
            self._pooling_admission.dispatch_waiting()
        lengths = [len(item.token_ids) for item in prompts.inputs]
        self._metrics.pooled(lengths, self._clock() - arrived_at)
        return found

    async def _in_task(self, prompts: PoolingPrompts, arrived_at: float) -> list[Vector]:
        """Compute the vectors of a request in a task of its own, so that `close` can cancel it."""
        task = asyncio.create_task(self._admit_and_run(prompts, arrived_at))
        self._tasks.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            # Either `close` has cancelled the task, or the client's disconnect has cancelled the caller of this method.
            if self._is_closed:
                raise UnavailableError("the router is shutting down", code="stopping") from None
            task.cancel()
            raise
        finally:
            self._tasks.discard(task)

    async def _admit_and_run(self, prompts: PoolingPrompts, arrived_at: float) -> list[Vector]:
        """Wait until the request may go to instances, and compute its vectors. A trace span records both."""
        with self._tracing.span("pooling_request", prompts.trace_headers, at=arrived_at) as span:
            span.set({"gen_ai.request.id": prompts.request_id, "gen_ai.usage.prompt_tokens": prompts.num_tokens})
            with await self._admit(prompts, arrived_at) as dispatched:
                call = _PoolingCall(
                    msgspec.structs.replace(prompts, trace_headers=span.headers),
                    self._cluster,
                    self._rules,
                    deadline=arrived_at + self._rules.request_timeout_s,
                    clock=self._clock,
                    retries=self._admission.retries,
                    on_sent=dispatched.end,
                )
                self._admission.retries.record_request()
                return await call.run()

    async def _admit(self, prompts: PoolingPrompts, arrived_at: float) -> DispatchedTokens:
        """Wait until the request may go to its instances. Return the object that counts its tokens; the caller calls
        `end` on it.

        After any exception, such as `RateLimitError`, its tokens are not counted for the caller any more.
        """
        try:
            return await self._pooling_admission.admit(self._demand(prompts, arrived_at))
        except BaseException:
            admission = self._admission
            admission.ledger.refund(prompts.caller, tokens=prompts.num_tokens, now=admission.wall_clock())
            raise

    def _demand(self, prompts: PoolingPrompts, arrived_at: float) -> PoolingDemand:
        return PoolingDemand(
            num_tokens=prompts.num_tokens,
            priority=prompts.priority,
            caller=prompts.caller,
            slo=prompts.slo,
            arrived_at=arrived_at,
            candidates=lambda: candidates(self._cluster, self._clock(), prompts.model),
            granted=asyncio.get_running_loop().create_future(),
        )

    def _count_against_limits(self, prompts: PoolingPrompts) -> int:
        """Count a request and its tokens against the limits of the caller's API key. Return how many places of
        `--max-concurrent-requests` it takes.

        Raises `RateLimitError` (status 429) if too many inputs are being computed or the key is over a limit; then
        nothing is counted.
        """
        # A request with more inputs than its caller may have places could never run, so it takes as many as there are.
        admission, running, owner = self._admission, self._shares.total, prompts.caller.name
        num_places = min(len(prompts.inputs), self._shares.largest)
        if running + num_places > admission.max_requests:
            raise RateLimitError(
                f"{running} of at most {admission.max_requests} inputs are being computed "
                f"(--max-concurrent-requests), {len(prompts.inputs)} more do not fit: retry later",
                retry_after_s=_RETRY_AFTER_S,
            )
        if not self._shares.permits(owner, num_places):
            raise RateLimitError(
                f"{admission.share_error(self._shares, owner)}: retry later", retry_after_s=_RETRY_AFTER_S
            )
        over = admission.ledger.admit(prompts.caller, tokens=prompts.num_tokens, now=admission.wall_clock())
        if over is not None:
            self._metrics.refused("key")
            raise RateLimitError(over.message, code="rate_limit_exceeded", retry_after_s=over.retry_after_s)
        return num_places

    def close(self) -> None:
        """Fail all running and waiting requests with status 503, because the router stops."""
        self._is_closed = True
        self._pooling_admission.close()
        for task in self._tasks:
            task.cancel()


@dataclass(slots=True)
class _Group:
    """Some inputs of a pooling request that are sent to one instance in one message."""

    positions: list[int]
    """Indexes of the inputs in the request."""
    num_tokens: int = 0


class _PoolingCall:
    """Computes the vectors of one pooling request that was admitted. Each group of inputs has a task of its own."""

    def __init__(
        self,
        prompts: PoolingPrompts,
        cluster: Cluster,
        rules: RequestPolicy,
        *,
        deadline: float,
        clock: Callable[[], float],
        retries: RetryBudget,
        on_sent: Callable[[], None],
    ) -> None:
        """Prepare the computation; `run` does it. `on_sent` is called whenever a group of inputs starts to count as
        load of an instance.

        `deadline` is a time of `clock` in seconds; `retries` is the budget of retries that all requests share.
        """
        self._prompts = prompts
        self._cluster = cluster
        self._rules = rules
        self._deadline = deadline
        self._clock = clock
        self._retries = retries
        self._on_sent = on_sent
        self._vectors: dict[int, Vector] = {}
        self._avoided: set[InstanceId] = set()
        self._num_calls = 0

    async def run(self) -> list[Vector]:
        """Compute all vectors and return them in the order of the inputs. Raises `ApiError`, also if the deadline
        passes.
        """
        left_s = max(0.0, self._deadline - self._clock())
        try:
            async with asyncio.timeout(left_s):
                await self._compute_all(left_s)
        except TimeoutError as exc:
            seconds = self._rules.request_timeout_s
            limit = f"{seconds:g} s (--request-timeout-s of the router)"
            raise DeadlineError(f"the request did not finish within {limit}; send fewer inputs") from exc
        return [self._vectors[position] for position in range(len(self._prompts.inputs))]

    async def _compute_all(self, left_s: float) -> None:
        """Compute all groups of inputs at the same time, within `left_s` seconds. The first failure cancels the other
        groups.
        """
        error: ApiError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                found = candidates(self._cluster, self._clock(), self._prompts.model)
                for group in split(self._prompts.inputs, max(1, len(found))):
                    tasks.create_task(self._compute(group, left_s))
        except* ApiError as errors:
            error = _first(errors)
        # Raised outside of `except*`, which would wrap it in a group again.
        if error is not None:
            raise error

    async def _compute(self, group: _Group, left_s: float) -> None:
        """Send a group of inputs to instances, one after another, until all its vectors have arrived or no retry is
        left. Raises `ApiError`.
        """
        for attempt in range(self._rules.max_replays + 1):
            worker = await self._worker(group)
            # Vectors that an instance has sent before it failed are kept; only the other inputs are computed again.
            call = _InstanceCall(self._positions_left(group), self._vectors)
            self._num_calls += 1
            await self._send(worker, call, RequestId(f"{self._prompts.request_id}~{self._num_calls}"), left_s)
            error = call.error()
            if error is None:
                worker.circuit_breaker.succeeded()
                return
            # The input itself is at fault, so that every instance would reject it.
            if isinstance(error, BadRequestError):
                raise error
            instance = worker.record.instance
            extra = {"request_id": self._prompts.request_id}
            tries = f"attempt {attempt + 1} of {self._rules.max_replays + 1}"
            logger.warning("pooling failed on instance %s (%s): %s", instance, tries, error.message, extra=extra)
            self._avoided.add(instance)
            # The instance has failed even if this was the last attempt, so this comes before the checks below.
            self._record_failure(worker, call)
            if attempt == self._rules.max_replays or not self._take_retry(call):
                raise error
            await asyncio.sleep(_BACKOFF_S * 2**attempt)

    def _record_failure(self, worker: WorkerState, call: "_InstanceCall") -> None:
        """Count a failed call in the circuit breaker of its instance, if the error code means that the instance is
        broken.
        """
        # The cluster counts the loss of an instance itself, and an instance that is full is healthy.
        if call.failed is not None and call.failed.code in ("internal", "timeout"):
            worker.circuit_breaker.failed(self._clock())

    def _take_retry(self, call: "_InstanceCall") -> bool:
        """Take a retry from the budget that all requests share, if a retry of this failed call needs one. Return False
        if the budget is used up.
        """
        needs_budget = call.failed is not None and call.failed.code in ("overloaded", "internal")
        return not needs_budget or self._retries.take_retry(self._clock())

    async def _send(self, worker: WorkerState, call: "_InstanceCall", request_id: RequestId, left_s: float) -> None:
        """Send the inputs of `call` to an instance, and wait until it has answered, has failed or was lost. `left_s` is
        the time that is left for it, in seconds.
        """
        inputs = [self._prompts.inputs[position] for position in call.positions]
        num_tokens = sum(len(item.token_ids) for item in inputs)
        digests = dict.fromkeys(span.digest for item in inputs for span in item.media)
        message = Pool(
            request_id=request_id,
            inputs=inputs,
            params=self._prompts.params,
            priority=self._prompts.priority,
            timeout_s=max(0.1, left_s),
            images=[self._prompts.images[digest] for digest in digests],
        )
        send = worker.prepare(message)
        estimate = LoadEstimate(handler=call, prefill_tokens=num_tokens, sequences=len(inputs), blocks=0)
        with worker.assign(request_id, estimate):
            try:
                worker.circuit_breaker.begin_attempt(request_id, self._clock())
                # From here on the load estimate of the worker counts the tokens.
                self._on_sent()
                send()
                await call.end
            finally:
                # The request was cancelled or has timed out, and the instance would go on computing.
                if not call.is_finished:
                    worker.send(Cancel(request_id))

    async def _worker(self, group: _Group) -> WorkerState:
        """Return the instance that is predicted to finish the group first; if no instance is ready, wait for one.

        Raises `UnavailableError` if none becomes ready within `instance_wait_s`.
        """
        chosen = self._pick(group)
        if chosen is None and await self._cluster.wait_until(
            lambda: self._pick(group) is not None, within_s=self._rules.instance_wait_s
        ):
            chosen = self._pick(group)
        if chosen is None:
            raise UnavailableError("no instance is ready that serves a pooling model", retry_after_s=_RETRY_AFTER_S)
        return chosen

    def _pick(self, group: _Group) -> WorkerState | None:
        """Return the instance that is predicted to finish the group first, or None if no instance is ready. Prefer
        instances that have not failed this request.
        """
        found = candidates(self._cluster, self._clock(), self._prompts.model)
        trusted = [candidate for candidate in found if candidate.instance not in self._avoided]
        best = fastest_candidate(group.num_tokens, trusted or found)
        return self._cluster.worker(best.instance) if best is not None else None

    def _positions_left(self, group: _Group) -> list[int]:
        """Return the indexes of the group's inputs that have no vector yet: an instance may have answered some before
        it failed.
        """
        return [position for position in group.positions if position not in self._vectors]


@dataclass(slots=True)
class _InstanceCall:
    """One message with inputs of a request to one instance, and the answers to it. Implements
    `cluster.worker_state.AnswerHandler`.
    """

    positions: list[int]
    found: dict[int, Vector]
    """Vectors of the whole request, by position; shared by all its calls."""
    end: "asyncio.Future[None]" = field(init=False)
    """Done when no more answers will come."""
    num_answers: int = 0
    failed: Failed | None = None
    lost: str | None = None
    """Reason of the loss of the instance."""

    def __post_init__(self) -> None:
        self.end = asyncio.get_running_loop().create_future()

    @property
    def is_finished(self) -> bool:
        """True once all vectors of this call have arrived, the instance has failed, or its connection was lost."""
        return self.num_answers == len(self.positions) or self.failed is not None or self.lost is not None

    def error(self) -> ApiError | None:
        """Return the error for the client if the call has failed, or None if all vectors have arrived."""
        if self.lost is not None:
            return UnavailableError(f"the connection to an instance was lost: {self.lost}", code="instance_lost")
        if self.failed is None:
            return None
        if self.failed.code in ("invalid", "too_long"):
            return BadRequestError(self.failed.message, code=self.failed.code)
        return failure_error(self.failed)

    def on_answer(self, worker: WorkerState, answer: Answer, now: float) -> None:
        match answer:
            case Pooled():
                self.found[self.positions[answer.index]] = Vector(answer.shape, answer.data)
                self.num_answers += 1
            case Failed():
                self.failed = answer
        self._end_if_finished()

    def on_lost(self, worker: WorkerState, reason: str) -> None:
        self.lost = reason
        self._end_if_finished()

    def _end_if_finished(self) -> None:
        if self.is_finished and not self.end.done():
            self.end.set_result(None)


def candidates(cluster: Cluster, now: float, model: frozenset[str] | None = None) -> list[Candidate]:
    """Return the instances that serve a pooling model and accept requests, as candidates for placement, with their load
    at `now`.

    With `model`, return only instances of the model that has one of these names.
    """
    workers = [w for w in cluster.workers() if w.takes_work and w.record.pooling is not None]
    workers = [w for w in workers if model is None or serves_model(w.record, model)]
    # An instance whose circuit breaker is open may still work: it is better than none.
    healthy = [w for w in workers if w.circuit_breaker.allows(now)]
    return [w.candidate(_NO_MATCH, now) for w in healthy or workers]


def fastest_candidate(num_tokens: int, among: Sequence[Candidate]) -> Candidate | None:
    """Return the instance in `among` that is predicted to finish `num_tokens` more tokens first, or None if `among` is
    empty.
    """
    return min(among, key=lambda c: (c.time_to_first_token_s(num_tokens), c.instance), default=None)


def split(inputs: Sequence[PoolingInput], num_instances: int) -> list[_Group]:
    """Split the inputs of a request into groups, in their order, so that all instances are busy and no message gets too
    long.
    """
    # `-(-a // b)` rounds up: otherwise there could be one more group than instances.
    total = sum(len(item.token_ids) for item in inputs)
    wanted = min(MAX_GROUP_TOKENS, max(MIN_GROUP_TOKENS, -(-total // num_instances)))
    groups: list[_Group] = []
    for position, item in enumerate(inputs):
        # A group is closed when it has reached its size; it may exceed it by a part of its last input.
        if not groups or groups[-1].num_tokens >= wanted:
            groups.append(_Group([]))
        groups[-1].positions.append(position)
        groups[-1].num_tokens += len(item.token_ids)
    return groups


def _first(errors: BaseExceptionGroup[ApiError]) -> ApiError:
    """Return the first `ApiError` of an exception group, which may contain other groups."""
    for error in errors.exceptions:
        return error if isinstance(error, ApiError) else _first(error)
    raise AssertionError("an exception group is never empty")

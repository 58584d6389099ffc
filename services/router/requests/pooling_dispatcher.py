"""One API call's inputs to vectors: in groups to the instances that are done with them first, again if one is lost.

However a call ends, every instance that works for it is told.
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
from baton_serve.contracts.pooling import PoolingInput, PoolingParams
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
from baton_serve.services.router.requests.pooling_admission import Going, PoolingAdmission, PoolingDemand
from baton_serve.services.router.requests.prompt_request import RequestPolicy

T = TypeVar("T")

_TURN_BYTES = 64 * 1024
"""Of float32. Each takes 0.1 to 0.2 us to write, or in a cosine."""


@dataclass(frozen=True, slots=True)
class Vector:
    """`data` are little-endian float32 numbers, row by row."""

    shape: Sequence[int]
    data: bytes

    def values(self) -> "array[float]":
        """All of them, row after row, in an eighth of the memory of `numbers`."""
        values = array("f", self.data)
        if sys.byteorder == "big":
            values.byteswap()
        return values

    def numbers(self) -> list[float]:
        """All of them, row after row."""
        return self.values().tolist()

    def rows(self) -> "list[Vector]":
        """Of a matrix."""
        width = 4 * self.shape[1]
        return [Vector(self.shape[1:], self.data[at : at + width]) for at in range(0, len(self.data), width)]

    def written(self, encoding: Literal["float", "base64"]) -> bytes:
        """JSON of a vector, or of anything as base64."""
        return msgspec.json.encode(b64encode(self.data).decode("ascii") if encoding == "base64" else self.numbers())


async def written(vectors: Sequence[Vector], encoding: Literal["float", "base64"]) -> list[msgspec.Raw]:
    """As JSON. A request may have thousands, each with thousands of numbers: other requests have turns between them."""
    texts: list[msgspec.Raw] = []
    async for vector in in_turns(vectors, lambda vector: len(vector.data)):
        if encoding == "float" and len(vector.shape) == 2:
            rows = [row.written(encoding) async for row in in_turns(vector.rows(), lambda row: len(row.data))]
            texts.append(msgspec.Raw(b"[" + b",".join(rows) + b"]"))
        else:
            texts.append(msgspec.Raw(vector.written(encoding)))
    return texts


async def in_turns(items: Sequence[T], size: Callable[[T], int]) -> AsyncIterator[T]:
    """All of them, with a turn of the event loop after each `_TURN_BYTES` of what `size` says of them."""
    done = 0
    for item in items:
        yield item
        done += size(item)
        if done >= _TURN_BYTES:
            done = 0
            await asyncio.sleep(0)


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """0 where one of them is all zeros."""
    lengths = sqrt(sum(map(mul, first, first)) * sum(map(mul, second, second)))
    return sum(map(mul, first, second)) / lengths if lengths else 0.0


logger = logging.getLogger(__name__)

MAX_GROUP_TOKENS = 8192
MIN_GROUP_TOKENS = 512
"""Fewer are not worth a second instance."""
_BACKOFF_S = 0.05
_RETRY_AFTER_S = 1.0
_NO_MATCH = Match()


class PoolingPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """`request_id` is unique in the cluster."""

    request_id: str
    inputs: Sequence[PoolingInput]
    params: PoolingParams
    priority: int = 0
    caller: Caller = ANONYMOUS
    slo: Slo = NO_SLO
    """Its time to the first token is that to the whole answer."""
    trace_headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    model: frozenset[str] | None = None
    """Names of the model whose instances may compute it; None where the router serves no other."""

    @property
    def num_tokens(self) -> int:
        return sum(len(given.token_ids) for given in self.inputs)


class PoolingDispatcher:
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
        self._num_inputs = 0
        self._is_closed = False
        self._tracing = tracing or Tracing()
        self._pooling_admission = PoolingAdmission(admission, metrics, clock=clock)
        cluster.add_listener(self._pooling_admission.dispatch_waiting)

    async def vectors(self, prompts: PoolingPrompts, *, arrived_at: float) -> list[Vector]:
        """One for each input, in their order. Raises `ApiError`; cancelling it ends the work."""
        self._check_limits(prompts)
        self._num_inputs += len(prompts.inputs)
        try:
            found = await self._in_task(prompts, arrived_at)
        finally:
            self._num_inputs -= len(prompts.inputs)
            self._pooling_admission.dispatch_waiting()
        lengths = [len(given.token_ids) for given in prompts.inputs]
        self._metrics.pooled(lengths, self._clock() - arrived_at)
        return found

    async def _in_task(self, prompts: PoolingPrompts, arrived_at: float) -> list[Vector]:
        """In a task of its own, so that `close` can end it."""
        task = asyncio.create_task(self._in_turn(prompts, arrived_at))
        self._tasks.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._is_closed:
                raise UnavailableError("the router stops", code="stopping") from None
            task.cancel()
            raise
        finally:
            self._tasks.discard(task)

    async def _in_turn(self, prompts: PoolingPrompts, arrived_at: float) -> list[Vector]:
        with self._tracing.span("pooling_request", prompts.trace_headers, at=arrived_at) as span:
            span.set({"gen_ai.request.id": prompts.request_id, "gen_ai.usage.prompt_tokens": prompts.num_tokens})
            with await self._take_turn(prompts, arrived_at) as going:
                call = _PoolingCall(
                    msgspec.structs.replace(prompts, trace_headers=span.headers),
                    self._cluster,
                    self._rules,
                    deadline=arrived_at + self._rules.request_timeout_s,
                    clock=self._clock,
                    retries=self._admission.retries,
                    on_sent=going.end,
                )
                self._admission.retries.record_request()
                return await call.run()

    async def _take_turn(self, prompts: PoolingPrompts, arrived_at: float) -> Going:
        """Raises `RateLimitError`; then the caller has used no tokens."""
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

    def _check_limits(self, prompts: PoolingPrompts) -> None:
        """Raises `RateLimitError`."""
        admission, running = self._admission, self._num_inputs
        if running and running + len(prompts.inputs) > admission.max_requests:
            raise RateLimitError(
                f"{running} inputs are being computed and {admission.max_requests} is the limit: try again later",
                retry_after_s=_RETRY_AFTER_S,
            )
        over = admission.ledger.admit(prompts.caller, tokens=prompts.num_tokens, now=admission.wall_clock())
        if over is not None:
            self._metrics.refused("key")
            raise RateLimitError(over.message, code="rate_limit_exceeded", retry_after_s=over.retry_after_s)

    def close(self) -> None:
        self._is_closed = True
        self._pooling_admission.close()
        for task in self._tasks:
            task.cancel()


@dataclass(slots=True)
class _Group:
    """`positions` are those of its inputs in the call."""

    positions: list[int]
    num_tokens: int = 0


class _PoolingCall:
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
        """`on_sent` is called whenever an instance has got work."""
        self._job = prompts
        self._cluster = cluster
        self._rules = rules
        self._deadline = deadline
        self._clock = clock
        self._retries = retries
        self._on_asked = on_sent
        self._found: dict[int, Vector] = {}
        self._avoided: set[InstanceId] = set()
        self._num_calls = 0

    async def run(self) -> list[Vector]:
        left_s = max(0.0, self._deadline - self._clock())
        try:
            async with asyncio.timeout(left_s):
                await self._compute_all(left_s)
        except TimeoutError as exc:
            seconds = self._rules.request_timeout_s
            raise DeadlineError(f"the request was not done within {seconds:g} s") from exc
        return [self._found[position] for position in range(len(self._job.inputs))]

    async def _compute_all(self, left_s: float) -> None:
        error: ApiError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                found = candidates(self._cluster, self._clock(), self._job.model)
                for group in split(self._job.inputs, max(1, len(found))):
                    tasks.create_task(self._compute(group, left_s))
        except* ApiError as errors:
            error = _first(errors)
        if error is not None:
            raise error

    async def _compute(self, group: _Group, left_s: float) -> None:
        """Asks instances until all of the group's vectors are there."""
        for attempt in range(self._rules.max_replays + 1):
            worker = await self._worker(group)
            asked = _InstanceCall(self._positions_left(group), self._found)
            self._num_calls += 1
            await self._send(worker, asked, RequestId(f"{self._job.request_id}~{self._num_calls}"), left_s)
            error = asked.error()
            if error is None:
                worker.circuit_breaker.succeeded()
                return
            if isinstance(error, BadRequestError):
                raise error
            instance = worker.record.instance
            extra = {"request_id": self._job.request_id}
            logger.warning("asked again: %s: %s", instance, error.message, extra=extra)
            self._avoided.add(instance)
            if attempt == self._rules.max_replays or not self._may_retry(worker, asked):
                raise error
            await asyncio.sleep(_BACKOFF_S * 2**attempt)

    def _may_retry(self, worker: WorkerState, asked: "_InstanceCall") -> bool:
        """Blames the instance, unless it was lost (the cluster has done so) or is merely full."""
        code = asked.failed.code if asked.failed is not None else None
        if code in ("internal", "timeout"):
            worker.circuit_breaker.failed(self._clock())
        return code not in ("overloaded", "internal") or self._retries.take_retry(self._clock())

    async def _send(self, worker: WorkerState, asked: "_InstanceCall", request_id: RequestId, left_s: float) -> None:
        inputs = [self._job.inputs[position] for position in asked.positions]
        num_tokens = sum(len(given.token_ids) for given in inputs)
        message = Pool(
            request_id=request_id,
            inputs=inputs,
            params=self._job.params,
            priority=self._job.priority,
            timeout_s=max(0.1, left_s),
        )
        send = worker.prepare(message)
        share = LoadEstimate(handler=asked, prefill_tokens=num_tokens, sequences=len(inputs), blocks=0)
        with worker.assign(request_id, share):
            try:
                worker.circuit_breaker.begin_attempt(self._clock())
                self._on_asked()
                send()
                await asked.end
            finally:
                if not asked.is_finished:
                    worker.send(Cancel(request_id))

    async def _worker(self, group: _Group) -> WorkerState:
        """The one that is done first; waits a while for one to come. Raises `UnavailableError`."""
        chosen = self._pick(group)
        if chosen is None and await self._cluster.wait_until(
            lambda: self._pick(group) is not None, within_s=self._rules.instance_wait_s
        ):
            chosen = self._pick(group)
        if chosen is None:
            raise UnavailableError("no instance is ready that computes vectors", retry_after_s=_RETRY_AFTER_S)
        return chosen

    def _pick(self, group: _Group) -> WorkerState | None:
        found = candidates(self._cluster, self._clock(), self._job.model)
        trusted = [candidate for candidate in found if candidate.instance not in self._avoided]
        best = fastest_candidate(group.num_tokens, trusted or found)
        return self._cluster.worker(best.instance) if best is not None else None

    def _positions_left(self, group: _Group) -> list[int]:
        return [position for position in group.positions if position not in self._found]


@dataclass(slots=True)
class _InstanceCall:
    """`services.router.cluster.worker_state.Assignment`: some inputs at one instance."""

    positions: list[int]
    found: dict[int, Vector]
    end: "asyncio.Future[None]" = field(init=False)
    num_answers: int = 0
    failed: Failed | None = None
    lost: str | None = None

    def __post_init__(self) -> None:
        self.end = asyncio.get_running_loop().create_future()

    @property
    def is_finished(self) -> bool:
        """The instance has nothing more to do for it."""
        return self.num_answers == len(self.positions) or self.failed is not None or self.lost is not None

    def error(self) -> ApiError | None:
        if self.lost is not None:
            return UnavailableError(f"an instance was lost: {self.lost}", code="instance_lost")
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
        self._end_if_over()

    def on_lost(self, worker: WorkerState, reason: str) -> None:
        self.lost = reason
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self.is_finished and not self.end.done():
            self.end.set_result(None)


def candidates(cluster: Cluster, now: float, model: frozenset[str] | None = None) -> list[Candidate]:
    """Instances that compute vectors and take work; with `model`, those of one of its names alone."""
    workers = [m for m in cluster.workers() if m.takes_work and m.record.pooling is not None]
    workers = [m for m in workers if model is None or serves_model(m.record, model)]
    healthy = [
        m for m in workers if m.circuit_breaker.allows(now)
    ]  # where all circuits are open, any instance is better
    return [m.candidate(_NO_MATCH, now) for m in healthy or workers]


def fastest_candidate(num_tokens: int, among: Sequence[Candidate]) -> Candidate | None:
    """The one that will have computed so many more tokens first."""
    return min(among, key=lambda c: (c.time_to_first_token_s(num_tokens), c.instance), default=None)


def split(inputs: Sequence[PoolingInput], num_instances: int) -> list[_Group]:
    """In their order, into groups that keep all instances busy and no frame too long."""
    total = sum(len(given.token_ids) for given in inputs)
    wanted = min(MAX_GROUP_TOKENS, max(MIN_GROUP_TOKENS, -(-total // num_instances)))
    groups: list[_Group] = []
    for position, given in enumerate(inputs):
        if not groups or groups[-1].num_tokens >= wanted:
            groups.append(_Group([]))
        groups[-1].positions.append(position)
        groups[-1].num_tokens += len(given.token_ids)
    return groups


def _first(errors: BaseExceptionGroup[ApiError]) -> ApiError:
    for error in errors.exceptions:
        return error if isinstance(error, ApiError) else _first(error)
    raise AssertionError("an exception group is never empty")

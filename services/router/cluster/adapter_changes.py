"""Adapters loaded and unloaded on request: every instance of a model is told, and all of them or none has it then."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence

from baton_serve.contracts.identity import InstanceId, RequestId
from baton_serve.contracts.messages import AdapterChanged, LoadAdapter, UnloadAdapter
from baton_serve.services.router.cluster.cluster import Cluster
from baton_serve.services.router.cluster.worker_state import WorkerState
from baton_serve.services.router.protocol.errors import (
    ApiError,
    BadRequestError,
    DeadlineError,
    NotFoundError,
    UnavailableError,
)

logger = logging.getLogger(__name__)

ADAPTER_TIMEOUT_S = 120.0

AdapterMessage = Callable[[RequestId], LoadAdapter | UnloadAdapter]
PendingChange = tuple[RequestId, InstanceId]


class AdapterRollout:
    """One change at a time."""

    def __init__(self, cluster: Cluster, *, timeout_s: float = ADAPTER_TIMEOUT_S) -> None:
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._pending: dict[PendingChange, asyncio.Future[AdapterChanged | None]] = {}
        self._one_at_a_time = asyncio.Lock()
        self._unexpected, cluster.on_adapter_changed = cluster.on_adapter_changed, self._on_changed

    async def load(self, workers: Sequence[WorkerState], name: str, path: str) -> None:
        """Raises `ApiError`; then no instance has it that did not have it before."""
        async with self._one_at_a_time:
            answers = await self._broadcast(workers, lambda id: LoadAdapter(request_id=id, name=name, path=path))
            if (error := _error(answers)) is not None:
                done = [m for m in workers if _is_done(answers.get(m.record.instance))]
                await self._broadcast(done, lambda id: UnloadAdapter(request_id=id, name=name))
                raise error

    async def unload(self, workers: Sequence[WorkerState], name: str) -> None:
        """Raises `ApiError` when some instance did not answer. One that does not have it is as it should be."""
        async with self._one_at_a_time:
            answers = await self._broadcast(workers, lambda id: UnloadAdapter(request_id=id, name=name))
            if _unanswered(answers):
                raise _error(answers) or DeadlineError("not every instance has answered")

    async def _broadcast(
        self, workers: Sequence[WorkerState], message: AdapterMessage
    ) -> Mapping[InstanceId, AdapterChanged | TimeoutError | None]:
        """By instance; None for one that was lost meanwhile: it joins again with what the others have."""
        request_id = RequestId(f"adapter-{secrets.token_hex(8)}")
        loop = asyncio.get_running_loop()
        futures = {worker.record.instance: loop.create_future() for worker in workers}
        self._pending |= {(request_id, instance): future for instance, future in futures.items()}
        remove_listener = self._cluster.add_listener(lambda: self._give_up_lost(workers, futures))
        try:
            for worker in workers:
                worker.send(message(request_id))
            if futures:
                await asyncio.wait(futures.values(), timeout=self._timeout_s)
        finally:
            remove_listener()
            for instance in futures:
                self._pending.pop((request_id, instance), None)
        return {
            instance: future.result() if future.done() else TimeoutError(f"{instance} does not answer")
            for instance, future in futures.items()
        }

    def _give_up_lost(
        self, workers: Sequence[WorkerState], futures: Mapping[InstanceId, asyncio.Future[AdapterChanged | None]]
    ) -> None:
        for worker in workers:
            future = futures[worker.record.instance]
            is_known = self._cluster.worker(worker.record.instance) is worker and worker.state == "ready"
            if not is_known and not future.done():
                future.set_result(None)

    def _on_changed(self, worker: WorkerState, changed: AdapterChanged) -> None:
        future = self._pending.get((changed.request_id, worker.record.instance))
        if future is None:
            self._unexpected(worker, changed)
        elif not future.done():
            future.set_result(changed)


def _is_done(answer: AdapterChanged | TimeoutError | None) -> bool:
    return isinstance(answer, AdapterChanged) and answer.refusal is None


def _unanswered(answers: Mapping[InstanceId, AdapterChanged | TimeoutError | None]) -> list[InstanceId]:
    return [instance for instance, answer in answers.items() if isinstance(answer, TimeoutError)]


def _error(answers: Mapping[InstanceId, AdapterChanged | TimeoutError | None]) -> ApiError | None:
    for instance, answer in answers.items():
        if isinstance(answer, AdapterChanged) and answer.refusal is not None:
            kind = NotFoundError if answer.refusal == "not_found" else BadRequestError
            return kind(f"{instance}: {answer.message}", param="lora_path")
    if unanswered := _unanswered(answers):
        return DeadlineError(f"{', '.join(unanswered)} did not answer in time")
    if not any(_is_done(answer) for answer in answers.values()):
        return UnavailableError("no instance is left that could load it", retry_after_s=1.0)
    return None

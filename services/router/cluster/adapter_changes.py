"""Loads and unloads LoRA adapters on all instances of a model, for the HTTP endpoints `/v1/load_lora_adapter` and
`/v1/unload_lora_adapter`. If one instance rejects a new adapter, the others unload it again.
"""

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
"""Time in which every instance must answer; it is long because instances read adapters from storage."""

AdapterMessage = Callable[[RequestId], LoadAdapter | UnloadAdapter]
"""Builds the message to an instance for a given request id."""
PendingChange = tuple[RequestId, InstanceId]


class AdapterRollout:
    """Applies one adapter change at a time to the instances of the cluster, and waits for their answers."""

    def __init__(self, cluster: Cluster, *, timeout_s: float = ADAPTER_TIMEOUT_S) -> None:
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._pending: dict[PendingChange, asyncio.Future[AdapterChanged | None]] = {}
        self._one_at_a_time = asyncio.Lock()
        # `_unexpected` is the handler before this one. It gets the answers to messages that this class did not send,
        # namely to the `LoadAdapter` of an instance that joins.
        self._unexpected, cluster.on_adapter_changed = cluster.on_adapter_changed, self._on_changed

    async def load(self, workers: Sequence[WorkerState], name: str, path: str) -> None:
        """Load an adapter on all `workers` and wait for it.

        Raises `ApiError` if an instance rejects it or does not answer in time; then the instances that have loaded it
        unload it again.
        """
        async with self._one_at_a_time:
            answers = await self._broadcast(workers, lambda id: LoadAdapter(request_id=id, name=name, path=path))
            if (error := _error(answers)) is not None:
                done = [w for w in workers if _is_done(answers.get(w.record.instance))]
                await self._broadcast(done, lambda id: UnloadAdapter(request_id=id, name=name))
                raise error

    async def unload(self, workers: Sequence[WorkerState], name: str) -> None:
        """Unload an adapter on all `workers` and wait for it. An instance that does not have it counts as done.

        Raises `ApiError` if an instance does not answer in time.
        """
        async with self._one_at_a_time:
            answers = await self._broadcast(workers, lambda id: UnloadAdapter(request_id=id, name=name))
            if _unanswered(answers):
                raise _error(answers) or DeadlineError("not all instances have answered")

    async def _broadcast(
        self, workers: Sequence[WorkerState], message: AdapterMessage
    ) -> Mapping[InstanceId, AdapterChanged | TimeoutError | None]:
        """Send a message to all `workers` and return their answers, by instance.

        The value is a `TimeoutError` for an instance that did not answer in time, and None for one whose connection was
        lost meanwhile. The latter needs no answer: when it joins again it gets the adapters that the others have.
        """
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
            instance: future.result() if future.done() else TimeoutError(f"{instance} did not answer")
            for instance, future in futures.items()
        }

    def _give_up_lost(
        self, workers: Sequence[WorkerState], futures: Mapping[InstanceId, asyncio.Future[AdapterChanged | None]]
    ) -> None:
        """Stop waiting for instances that were lost. Called whenever the cluster changes."""
        for worker in workers:
            future = futures[worker.record.instance]
            # The same instance may be back already with a new `WorkerState`, which did not get the message.
            is_known = self._cluster.worker(worker.record.instance) is worker and worker.state == "ready"
            if not is_known and not future.done():
                future.set_result(None)

    def _on_changed(self, worker: WorkerState, changed: AdapterChanged) -> None:
        """Pass an answer to the change that waits for it."""
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
    """Return the error for the client: the first rejection, or else a timeout, or else that all instances were lost."""
    for instance, answer in answers.items():
        if isinstance(answer, AdapterChanged) and answer.refusal is not None:
            kind = NotFoundError if answer.refusal == "not_found" else BadRequestError
            return kind(f"{instance}: {answer.message}", param="lora_path")
    if unanswered := _unanswered(answers):
        return DeadlineError(f"the change of the adapter timed out on {', '.join(unanswered)}")
    if not any(_is_done(answer) for answer in answers.values()):
        return UnavailableError(
            "the connections to all instances of the model were lost: retry later", retry_after_s=1.0
        )
    return None

"""Sends one message to several instances, and waits until each has answered, is lost, or the deadline has passed."""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from baton_serve.contracts.identity import InstanceId, RequestId
from baton_serve.contracts.messages import ToInstance
from baton_serve.services.router.cluster.cluster import Cluster
from baton_serve.services.router.cluster.worker_state import WorkerState


class HasRequestId(Protocol):
    """An answer of an instance that contains the id of the message that it answers."""

    @property
    def request_id(self) -> RequestId: ...


A = TypeVar("A", bound=HasRequestId)


class Broadcast(Generic[A]):
    """Sends a message to several instances and collects their answers, of type `A`. Use it on the event loop only.

    The owner passes each answer that it receives to `on_answer`.
    """

    def __init__(self, cluster: Cluster, *, timeout_s: float) -> None:
        """Use the instances of `cluster`. A call of `send` waits for their answers at most `timeout_s` seconds."""
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._pending: dict[tuple[RequestId, InstanceId], asyncio.Future[A | None]] = {}

    async def send(
        self,
        workers: Sequence[WorkerState],
        message: Callable[[RequestId], ToInstance],
        *,
        timeout_s: float | None = None,
    ) -> Mapping[InstanceId, A | TimeoutError | None]:
        """Send a message to all `workers`, wait for their answers and return them by instance. `message` builds the
        message from the request id.

        `timeout_s` replaces that of the constructor, if it is not None. The answer is a `TimeoutError` for an instance
        that did not answer in time, and None for one whose connection was lost meanwhile.
        """
        request_id = RequestId(f"all-{secrets.token_hex(8)}")
        loop = asyncio.get_running_loop()
        futures: dict[InstanceId, asyncio.Future[A | None]] = {
            worker.record.instance: loop.create_future() for worker in workers
        }
        self._pending |= {(request_id, instance): future for instance, future in futures.items()}
        remove_listener = self._cluster.add_listener(lambda: self._give_up_lost(workers, futures))
        try:
            for worker in workers:
                worker.send(message(request_id))
            if futures:
                await asyncio.wait(futures.values(), timeout=self._timeout_s if timeout_s is None else timeout_s)
        finally:
            remove_listener()
            for instance in futures:
                self._pending.pop((request_id, instance), None)
        return {
            instance: future.result() if future.done() else TimeoutError(f"{instance} did not answer")
            for instance, future in futures.items()
        }

    def on_answer(self, worker: WorkerState, answer: A) -> bool:
        """Take an answer of an instance for the `send` that waits for it. Return False if no `send` waits for it."""
        future = self._pending.get((answer.request_id, worker.record.instance))
        if future is not None and not future.done():
            future.set_result(answer)
        return future is not None

    def _give_up_lost(
        self, workers: Sequence[WorkerState], futures: Mapping[InstanceId, asyncio.Future[A | None]]
    ) -> None:
        """Stop waiting for answers of instances whose connection is lost. It is called whenever the cluster changes."""
        for worker in workers:
            future = futures[worker.record.instance]
            # The same instance may be back already with a new `WorkerState`, which did not get the message.
            is_known = self._cluster.worker(worker.record.instance) is worker and worker.state == "ready"
            if not is_known and not future.done():
                future.set_result(None)

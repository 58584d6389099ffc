"""Loads and unloads a LoRA adapter on all instances of a model, all of them or none (`/v1/load_lora_adapter`). If one
instance rejects a new adapter, the others unload it again.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from baton_serve.contracts.identity import InstanceId
from baton_serve.contracts.messages import AdapterChanged, LoadAdapter, UnloadAdapter
from baton_serve.services.router.cluster.broadcast import Broadcast
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


class AdapterRollout:
    """Loads or unloads a LoRA adapter on many instances and waits for their answers. It makes one change at a time."""

    def __init__(self, cluster: Cluster, *, timeout_s: float = ADAPTER_TIMEOUT_S) -> None:
        # An instance that is lost meanwhile needs no answer: when it joins again it gets the adapters of the others.
        self._broadcast = Broadcast[AdapterChanged](cluster, timeout_s=timeout_s)
        self._one_at_a_time = asyncio.Lock()
        # `_unexpected` is the handler before this one. It gets the answers to messages that this class did not send,
        # namely to the `LoadAdapter` of an instance that joins.
        self._unexpected, cluster.on_adapter_changed = cluster.on_adapter_changed, self._on_changed

    async def load(self, workers: Sequence[WorkerState], name: str, path: str, *, in_place: bool = False) -> None:
        """Load the adapter in the folder `path` on all `workers` under `name`, and wait until they have done so. With
        `in_place` it replaces an adapter of the same name.

        Raises `ApiError` if an instance rejects it or does not answer in time. Then the instances that have loaded it
        unload it again, unless it was a replacement. An instance that rejects a replacement keeps the previous adapter.
        """
        async with self._one_at_a_time:
            answers = await self._broadcast.send(
                workers, lambda id: LoadAdapter(request_id=id, name=name, path=path, in_place=in_place)
            )
            if (error := _error(answers)) is not None:
                # Unloading would remove the name, and the previous files may not exist any more.
                if in_place:
                    raise error
                done = [w for w in workers if _is_done(answers.get(w.record.instance))]
                await self._broadcast.send(done, lambda id: UnloadAdapter(request_id=id, name=name))
                raise error

    async def unload(self, workers: Sequence[WorkerState], name: str) -> None:
        """Unload the adapter `name` on all `workers` and wait until they have done so. An instance that does not have
        it counts as done.

        Raises `ApiError` if an instance does not answer in time.
        """
        async with self._one_at_a_time:
            answers = await self._broadcast.send(workers, lambda id: UnloadAdapter(request_id=id, name=name))
            if _unanswered(answers):
                raise _error(answers) or DeadlineError("not all instances have answered")

    def _on_changed(self, worker: WorkerState, changed: AdapterChanged) -> None:
        """Pass an instance's answer to the call of `load` or `unload` that waits for it."""
        if not self._broadcast.on_answer(worker, changed):
            self._unexpected(worker, changed)


def _is_done(answer: AdapterChanged | TimeoutError | None) -> bool:
    return isinstance(answer, AdapterChanged) and answer.refusal is None


def _unanswered(answers: Mapping[InstanceId, AdapterChanged | TimeoutError | None]) -> list[InstanceId]:
    return [instance for instance, answer in answers.items() if isinstance(answer, TimeoutError)]


def _error(answers: Mapping[InstanceId, AdapterChanged | TimeoutError | None]) -> ApiError | None:
    """Return the error for the client, or None if a change of adapters has succeeded: the first rejection, or else a
    timeout, or else that all instances were lost.
    """
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

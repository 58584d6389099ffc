"""Adapters loaded and unloaded on request: every instance of a model is told, and all of them or none has it then."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence

from baton_serve.contracts.identity import InstanceId, RequestId
from baton_serve.contracts.messages import AdapterChanged, LoadAdapter, UnloadAdapter
from baton_serve.services.router.cluster.cluster import Cluster
from baton_serve.services.router.cluster.worker_state import Member
from baton_serve.services.router.protocol.errors import (
    ApiError,
    BadRequestError,
    DeadlineError,
    NotFoundError,
    UnavailableError,
)

logger = logging.getLogger(__name__)

TIMEOUT_S = 120.0

Message = Callable[[RequestId], LoadAdapter | UnloadAdapter]
Waiting = tuple[RequestId, InstanceId]


class AdapterChanges:
    """One change at a time."""

    def __init__(self, cluster: Cluster, *, timeout_s: float = TIMEOUT_S) -> None:
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._waiting: dict[Waiting, asyncio.Future[AdapterChanged | None]] = {}
        self._one_at_a_time = asyncio.Lock()
        self._unexpected, cluster.on_adapter_changed = cluster.on_adapter_changed, self._on_changed

    async def load(self, members: Sequence[Member], name: str, path: str) -> None:
        """Raises `ApiError`; then no instance has it that did not have it before."""
        async with self._one_at_a_time:
            answers = await self._tell(members, lambda id: LoadAdapter(request_id=id, name=name, path=path))
            if (error := _error(answers)) is not None:
                done = [m for m in members if _is_done(answers.get(m.record.instance))]
                await self._tell(done, lambda id: UnloadAdapter(request_id=id, name=name))
                raise error

    async def unload(self, members: Sequence[Member], name: str) -> None:
        """Raises `ApiError` when some instance did not answer. One that does not have it is as it should be."""
        async with self._one_at_a_time:
            answers = await self._tell(members, lambda id: UnloadAdapter(request_id=id, name=name))
            if _late(answers):
                raise _error(answers) or DeadlineError("not every instance has answered")

    async def _tell(
        self, members: Sequence[Member], message: Message
    ) -> Mapping[InstanceId, AdapterChanged | TimeoutError | None]:
        """By instance; None for one that was lost meanwhile: it joins again with what the others have."""
        request_id = RequestId(f"adapter-{secrets.token_hex(8)}")
        loop = asyncio.get_running_loop()
        futures = {member.record.instance: loop.create_future() for member in members}
        self._waiting |= {(request_id, instance): future for instance, future in futures.items()}
        stop_listening = self._cluster.listen(lambda: self._give_up_lost(members, futures))
        try:
            for member in members:
                member.send(message(request_id))
            if futures:
                await asyncio.wait(futures.values(), timeout=self._timeout_s)
        finally:
            stop_listening()
            for instance in futures:
                self._waiting.pop((request_id, instance), None)
        return {
            instance: future.result() if future.done() else TimeoutError(f"{instance} does not answer")
            for instance, future in futures.items()
        }

    def _give_up_lost(
        self, members: Sequence[Member], futures: Mapping[InstanceId, asyncio.Future[AdapterChanged | None]]
    ) -> None:
        for member in members:
            future = futures[member.record.instance]
            is_known = self._cluster.member(member.record.instance) is member and member.state == "ready"
            if not is_known and not future.done():
                future.set_result(None)

    def _on_changed(self, member: Member, changed: AdapterChanged) -> None:
        future = self._waiting.get((changed.request_id, member.record.instance))
        if future is None:
            self._unexpected(member, changed)
        elif not future.done():
            future.set_result(changed)


def _is_done(answer: AdapterChanged | TimeoutError | None) -> bool:
    return isinstance(answer, AdapterChanged) and answer.refusal is None


def _late(answers: Mapping[InstanceId, AdapterChanged | TimeoutError | None]) -> list[InstanceId]:
    return [instance for instance, answer in answers.items() if isinstance(answer, TimeoutError)]


def _error(answers: Mapping[InstanceId, AdapterChanged | TimeoutError | None]) -> ApiError | None:
    for instance, answer in answers.items():
        if isinstance(answer, AdapterChanged) and answer.refusal is not None:
            kind = NotFoundError if answer.refusal == "not_found" else BadRequestError
            return kind(f"{instance}: {answer.message}", param="lora_path")
    if late := _late(answers):
        return DeadlineError(f"{', '.join(late)} did not answer in time")
    if not any(_is_done(answer) for answer in answers.values()):
        return UnavailableError("no instance is left that could load it", retry_after_s=1.0)
    return None

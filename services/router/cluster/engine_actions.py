"""Lets all engines of a model do what an operator asks for: forget cached prefixes, or record a profile."""

import asyncio
from collections.abc import Mapping, Sequence

from baton_serve.contracts.messages import EngineAction, EngineCommand, EngineCommandDone
from baton_serve.services.router.cluster.broadcast import Broadcast
from baton_serve.services.router.cluster.cluster import Cluster
from baton_serve.services.router.cluster.worker_state import WorkerState
from baton_serve.services.router.protocol.errors import BadRequestError, DeadlineError, UnavailableError

ACTION_TIMEOUT_S = 120.0
"""Time in which every instance must answer. It is long because the trace of a long profile is written slowly."""


class EngineActions:
    """Sends the commands of operators to instances, one after another. Event loop only."""

    def __init__(self, cluster: Cluster, *, timeout_s: float = ACTION_TIMEOUT_S) -> None:
        self._broadcast = Broadcast[EngineCommandDone](cluster, timeout_s=timeout_s)
        # Two operators must not start and stop profiles of the same instances at once.
        self._one_at_a_time = asyncio.Lock()
        cluster.on_engine_command_done = self._on_done

    async def run(self, workers: Sequence[WorkerState], action: EngineAction) -> Mapping[str, str]:
        """Let all `workers` execute an action, and return what each has answered, by instance.

        Raises `BadRequestError` if an instance refuses it, after all have answered. Raises `DeadlineError` if one does
        not answer in time, and `UnavailableError` if one was lost.
        """
        async with self._one_at_a_time:
            answers = await self._broadcast.send(workers, lambda id: EngineCommand(request_id=id, action=action))
        done: dict[str, str] = {}
        for instance, answer in answers.items():
            if isinstance(answer, TimeoutError):
                raise DeadlineError(f"{action} timed out on {instance}; other instances may have executed it")
            if answer is None:
                raise UnavailableError(f"{action}: the connection to {instance} was lost: retry", retry_after_s=1.0)
            if answer.error is not None:
                raise BadRequestError(f"{instance}: {answer.error}")
            done[instance] = answer.result
        return done

    def _on_done(self, worker: WorkerState, answer: EngineCommandDone) -> None:
        # An answer after the deadline has no receiver any more.
        self._broadcast.on_answer(worker, answer)

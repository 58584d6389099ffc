"""Lets all instances of a model reset their prefix cache, or start and stop a profile, as operators ask."""

import asyncio
from collections.abc import Mapping, Sequence

from baton_serve.contracts.identity import InstanceId
from baton_serve.contracts.messages import EngineAction, EngineCommand, EngineCommandDone, ModelAction, WeightsSource
from baton_serve.services.router.cluster.broadcast import Broadcast
from baton_serve.services.router.cluster.cluster import Cluster
from baton_serve.services.router.cluster.worker_state import WorkerState
from baton_serve.services.router.protocol.errors import (
    ApiError,
    BadRequestError,
    ConflictError,
    DeadlineError,
    UnavailableError,
)

ACTION_TIMEOUT_S = 120.0
"""Time in which every instance must answer. It is long because the trace of a long profile is written slowly."""

Answer = EngineCommandDone | TimeoutError | None
"""The answer of an instance: a `TimeoutError` if none came in time, and None if the connection was lost."""


class EngineActions:
    """Sends commands of operators, such as resetting the prefix cache, to instances. Use it on the event loop only."""

    def __init__(self, cluster: Cluster, *, timeout_s: float = ACTION_TIMEOUT_S) -> None:
        self._broadcast = Broadcast[EngineCommandDone](cluster, timeout_s=timeout_s)
        self.one_at_a_time = asyncio.Lock()
        """Held while an action runs: two operators must not change the same instances at once."""
        cluster.on_engine_command_done = self._on_done

    async def run(self, workers: Sequence[WorkerState], action: EngineAction) -> Mapping[str, str]:
        """Let all `workers` execute an action, and return the text that each has answered, by instance.

        Raises `BadRequestError` if an instance refuses it, after all have answered. Raises `DeadlineError` if one does
        not answer in time, and `UnavailableError` if the connection to one was lost.
        """
        async with self.one_at_a_time:
            return results(action, await self.ask(workers, action))

    async def ask(
        self,
        workers: Sequence[WorkerState],
        action: EngineAction | ModelAction,
        *,
        weights: WeightsSource | None = None,
        work_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> Mapping[InstanceId, Answer]:
        """Send a command to all `workers` and return their answers by instance. The caller holds `one_at_a_time`.

        `weights` says which weights to load, for commands that do so. `work_s` is the time in seconds that the command
        gives to the instance, and `timeout_s` the time in which answers must come (None: the default).
        """
        return await self._broadcast.send(
            workers,
            lambda id: EngineCommand(request_id=id, action=action, weights=weights, timeout_s=work_s),
            timeout_s=timeout_s,
        )

    def _on_done(self, worker: WorkerState, answer: EngineCommandDone) -> None:
        # An answer after the deadline has no receiver any more.
        self._broadcast.on_answer(worker, answer)


def results(action: str, answers: Mapping[InstanceId, Answer]) -> dict[str, str]:
    """Return the texts of all answers by instance. Raises an `ApiError` for the first instance that has not executed
    the action.
    """
    done: dict[str, str] = {}
    for instance, answer in answers.items():
        if (problem := problem_of(action, instance, answer)) is not None:
            raise problem
        assert isinstance(answer, EngineCommandDone)
        done[instance] = answer.result
    return done


def problem_of(action: str, instance: InstanceId, answer: Answer) -> ApiError | None:
    """Return the error for the client if an instance has not executed an action, or None if it has. `answer` is its
    answer, a `TimeoutError`, or None if the connection was lost.
    """
    if isinstance(answer, TimeoutError):
        return DeadlineError(f"{action} timed out on {instance}; other instances may have executed it")
    if answer is None:
        return UnavailableError(f"{action}: the connection to {instance} was lost: retry", retry_after_s=1.0)
    if answer.error is None:
        return None
    message = f"{instance}: {answer.error}"
    return ConflictError(message) if answer.is_conflict else BadRequestError(message)

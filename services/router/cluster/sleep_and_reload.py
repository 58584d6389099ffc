"""Sends commands to sleep, wake up and load new weights to all instances of a model: all of them, or none.

All instances first pause: they refuse new requests, which wait in the routers, and finish the running ones. Only if all
are idle, the model changes. An instance whose model has changed registers under a new generation, so its connection to
this router ends, sometimes before its answer arrives. So its registered state decides whether it has obeyed.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from baton_serve.contracts.identity import InstanceId
from baton_serve.contracts.messages import EngineCommandDone, WeightsSource
from baton_serve.services.router.cluster.cache_reset_and_profile import Answer, EngineActions, problem_of, results
from baton_serve.services.router.cluster.cluster import Cluster
from baton_serve.services.router.cluster.worker_state import WorkerState
from baton_serve.services.router.protocol.errors import ApiError, ConflictError, DeadlineError, UnavailableError

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 1800.0
"""Time in which an instance must load a model."""
SETTLE_TIMEOUT_S = 30.0
"""Time in which an instance must have registered again after its answer."""
_ANSWER_MARGIN_S = 10.0
"""Time beyond that of a pause in which its answer must arrive."""


class ModelActions:
    """Lets several instances sleep, wake up or load other weights together. Use it on the event loop only."""

    def __init__(self, cluster: Cluster, actions: EngineActions, *, settle_timeout_s: float = SETTLE_TIMEOUT_S) -> None:
        self._cluster = cluster
        self._actions = actions
        self._settle_timeout_s = settle_timeout_s

    async def sleep(self, workers: Sequence[WorkerState], *, drain_s: float) -> Mapping[str, str]:
        """Let all `workers` free the memory of the model, and return what each has answered, by instance.

        Instances that sleep already are left out. Raises `ConflictError` if requests still run after `drain_s` seconds;
        then no instance sleeps. Raises another `ApiError` if an instance has failed.
        """
        async with self._actions.one_at_a_time:
            awake = [worker for worker in workers if not worker.record.sleeping]
            await self._pause(awake, drain_s)
            answers = await self._actions.ask(awake, "sleep", timeout_s=LOAD_TIMEOUT_S)
            return await self._changed("sleep", awake, answers, lambda worker: worker.record.sleeping)

    async def wake_up(self, workers: Sequence[WorkerState]) -> Mapping[str, str]:
        """Let all `workers` that sleep load the model again, and return what each has answered, by instance.

        Raises an `ApiError` if an instance has failed; the others are awake then.
        """
        async with self._actions.one_at_a_time:
            asleep = [worker for worker in workers if worker.record.sleeping]
            answers = await self._actions.ask(asleep, "wake_up", timeout_s=LOAD_TIMEOUT_S)
            return await self._changed("wake_up", asleep, answers, lambda worker: worker.takes_work)

    async def update_weights(
        self, workers: Sequence[WorkerState], weights: WeightsSource, *, drain_s: float
    ) -> Mapping[str, str]:
        """Let all `workers` load other weights, and return what each has answered, by instance.

        Raises `ConflictError` if an instance sleeps or if requests still run after `drain_s` seconds, and another
        `ApiError` if an instance cannot load the weights. After any of these errors all instances serve with the old
        weights.
        """
        async with self._actions.one_at_a_time:
            if asleep := [worker.record.instance for worker in workers if worker.record.sleeping]:
                raise ConflictError(f"{', '.join(asleep)} sleeps: POST /wake_up first")
            # Most mistakes are found by a check, which disturbs no request.
            # It does not replace the roll-back below: memory may run out, or a file may be damaged behind its header.
            results("check_weights", await self._actions.ask(workers, "check_weights", weights=weights))
            await self._pause(workers, drain_s)
            try:
                return await self._load(workers, weights)
            finally:
                # Also after a failure, and of instances that have restarted meanwhile: for them it changes nothing.
                await self._resume(self._present(workers))

    async def _load(self, workers: Sequence[WorkerState], weights: WeightsSource) -> Mapping[str, str]:
        """Let paused instances load weights, and return what each has answered. If one fails, let the others load their
        previous weights again and raise its error.
        """
        answers = await self._actions.ask(
            workers, "update_weights", weights=weights, work_s=LOAD_TIMEOUT_S, timeout_s=LOAD_TIMEOUT_S
        )
        before = {worker.record.instance: worker.record.layout.fingerprint for worker in workers}

        # Each update has its own version, so the fingerprint proves it even if the answer was lost.
        def is_updated(worker: WorkerState) -> bool:
            return worker.record.layout.fingerprint != before[worker.record.instance]

        try:
            return await self._changed("update_weights", workers, answers, is_updated)
        except ApiError as exc:
            logger.warning("not all instances could load the weights in %s: %s", weights.model, exc)
            await self._restore([worker for worker in self._present(workers) if is_updated(worker)])
            raise

    async def _restore(self, workers: Sequence[WorkerState]) -> None:
        """Let instances load their previous weights again. A failure is logged and not raised."""
        answers = await self._actions.ask(workers, "restore_weights", work_s=LOAD_TIMEOUT_S, timeout_s=LOAD_TIMEOUT_S)
        try:
            await self._changed("restore_weights", workers, answers, lambda worker: True)
        except ApiError as exc:
            logger.error("the instances of a model have different weights now: %s", exc)  # noqa: TRY400

    async def _pause(self, workers: Sequence[WorkerState], drain_s: float) -> None:
        """Let all instances finish their requests within `drain_s` seconds and take no new ones. If one cannot, end the
        pause of all and raise `ApiError`.
        """
        answers = await self._actions.ask(workers, "pause", work_s=drain_s, timeout_s=drain_s + _ANSWER_MARGIN_S)
        try:
            results("pause", answers)
        except ApiError:
            # Instances that could not pause have ended their pause already; the others wait for a command.
            await self._resume(workers)
            raise

    async def _resume(self, workers: Sequence[WorkerState]) -> None:
        """End the pause of instances. An instance that cannot be reached ends its pause by itself when the time of the
        pause is over.
        """
        for instance, answer in (await self._actions.ask(workers, "resume")).items():
            if (problem := problem_of("resume", instance, answer)) is not None:
                logger.warning("cannot end the pause of an instance: %s", problem)

    async def _changed(
        self,
        action: str,
        workers: Sequence[WorkerState],
        answers: Mapping[InstanceId, Answer],
        is_done: Callable[[WorkerState], bool],
    ) -> Mapping[str, str]:
        """Wait until all instances have registered again after an action has changed their models. Return the text of
        each answer, by instance. `is_done` returns whether the action took effect on an instance.

        Raises `ApiError` for an instance that has refused the action, or that is not ready again in time.
        """
        wanted = {worker.record.instance: worker for worker in workers}
        # The reason of a lost connection is usually the change itself; see the module's docstring.
        problems = {
            instance: problem
            for instance, answer in answers.items()
            if answer is not None and (problem := problem_of(action, instance, answer)) is not None
        }

        def is_back(instance: InstanceId) -> bool:
            present = self._cluster.worker(instance)
            if present is None or present.state != "ready":
                return False
            return instance in problems or present.record.generation != wanted[instance].record.generation

        # An instance that has not answered may still load.
        timeout_s = self._settle_timeout_s if all(answers.values()) else LOAD_TIMEOUT_S
        for instance in await self._wait_for(list(wanted), is_back, timeout_s):
            problems.setdefault(instance, DeadlineError(f"{instance} is not ready after {action}: see its log"))
        for worker in self._present(workers):
            if not is_done(worker):
                failed = UnavailableError(f"{worker.record.instance} has restarted instead of {action}: see its log")
                problems.setdefault(worker.record.instance, failed)
        # One error is enough for the operator; the logs of the instances have all.
        for problem in problems.values():
            raise problem
        done = (answers[instance] for instance in wanted)
        texts = [answer.result if isinstance(answer, EngineCommandDone) else "done" for answer in done]
        return dict(zip(wanted, texts, strict=True))

    async def _wait_for(
        self, instances: Sequence[InstanceId], fact: Callable[[InstanceId], bool], timeout_s: float
    ) -> Sequence[InstanceId]:
        """Wait until `fact` is true for all instances. Return the instances for which it is still false after
        `timeout_s` seconds.
        """
        changed = asyncio.Event()
        remove_listener = self._cluster.add_listener(changed.set)
        try:
            async with asyncio.timeout(timeout_s):
                while not all(fact(instance) for instance in instances):
                    await changed.wait()
                    changed.clear()
        except TimeoutError:
            return [instance for instance in instances if not fact(instance)]
        finally:
            remove_listener()
        return []

    def _present(self, workers: Sequence[WorkerState]) -> list[WorkerState]:
        """Return the present `WorkerState` of each instance: an instance that has registered again has a new one.
        Instances that are gone are left out.
        """
        found = (self._cluster.worker(worker.record.instance) for worker in workers)
        return [worker for worker in found if worker is not None]

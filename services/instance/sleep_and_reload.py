"""Decides when an instance may pause, sleep, wake up or load new weights, and what a failure leaves behind.

    serving  ──pause──►  paused  ──sleep──►  sleeping ──wake_up──►  serving
                           ├ update_weights, restore_weights ──────►  paused
                           └ resume, or the end of its lease ──────►  serving

No request runs while an instance is paused. After an update it stays paused until all instances of the model have new
weights, because instances with different weights cannot exchange KV blocks. The host does the work: it owns the server
and the parts of the model.
"""

import asyncio
import logging
from typing import Literal, Protocol

import zmq

from baton_serve.contracts.messages import EngineCommand, WeightsSource
from baton_serve.engine.errors import EngineError
from baton_serve.kvtransfer import TransferError
from baton_serve.services.instance.errors import InstanceError

logger = logging.getLogger(__name__)

PAUSE_REASON = "the model is paused for a command of an operator"
PAUSE_LEASE_S = 30.0
"""Seconds beyond its timeout after which a pause ends by itself: the router that asked for it may have ended."""
PUBLISH_DELAY_S = 0.1
"""Seconds between the answer to a command and the new record in the registry."""
MAX_PAUSE_S = 3600.0
"""Longest time in seconds that a command may name."""

ModelState = Literal["serving", "pausing", "paused", "loading", "sleeping"]
LOAD_FAILURES = (EngineError, InstanceError, TransferError, zmq.ZMQError, OSError, RuntimeError)
"""Errors that loading a model may raise; torch raises `RuntimeError` if memory runs out."""


class ModelConflict(InstanceError):  # noqa: N818
    """The present state of the instance does not allow a command that changes its model, for example because it does
    not sleep.
    """


class ModelHost(Protocol):
    """The interface of the part of an instance process that owns its server and its model:
    `replaceable_model.InstanceModel`.
    """

    @property
    def num_requests(self) -> int: ...
    @property
    def is_draining(self) -> bool: ...
    def pause(self, reason: str) -> None:
        """Refuse new requests until `resume`; their routers get `reason`."""

    def resume(self) -> None:
        """Accept new requests again after `pause`."""

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no request runs on this instance; return False if one still runs after `timeout_s` seconds."""
        ...

    async def check(self, loaded: WeightsSource, weights: WeightsSource) -> None:
        """Raise `EngineError` if the model files `weights` cannot replace those of `loaded`, because the model has
        another shape.
        """

    async def unload(self, reason: str) -> None:
        """Close the loaded model, free its memory, and refuse requests with `reason` from now on."""

    async def load(self, weights: WeightsSource) -> None:
        """Load the model files `weights`, which serve after the next `publish`. After an error nothing is loaded."""

    async def publish(self, *, is_sleeping: bool, pause_reason: str) -> None:
        """Show the routers the loaded model, or that there is none, under a new generation. Requests are refused if
        `pause_reason` is not empty. `is_sleeping` is the state that the instance reports.
        """

    def give_up(self, reason: str) -> None:
        """End the process with an error that contains `reason`, because the instance has no model any more."""


class ModelSwitch:
    """Executes the commands of operators, passed on by routers, that change the model of this instance (pause, sleep,
    new weights), one at a time. Use it only on the event loop.
    """

    def __init__(
        self,
        host: ModelHost,
        weights: WeightsSource,
        *,
        pause_lease_s: float = PAUSE_LEASE_S,
        publish_delay_s: float = PUBLISH_DELAY_S,
    ) -> None:
        """Start in the state `serving`. `weights` are the files that `host` loaded at its start. A pause ends by itself
        `pause_lease_s` seconds after its time limit. `publish_delay_s` is the time between the answer to a command and
        the new registry record.
        """
        self._host = host
        self._weights = weights
        self._previous: WeightsSource | None = None
        self._pause_lease_s = pause_lease_s
        self._publish_delay_s = publish_delay_s
        self._lease: asyncio.TimerHandle | None = None
        self._is_changed = False
        self.state: ModelState = "serving"

    async def run(self, command: EngineCommand) -> str:
        """Execute `command` and return a text about its result. The caller answers the router, and then calls
        `publish`.

        Raises `ModelConflict` if the present state does not allow it, and `EngineError` or `InstanceError` if it has
        failed.
        """
        match command.action:
            case "pause":
                return await self._pause(_bounded(command.timeout_s))
            case "resume":
                return self._resume()
            case "check_weights":
                await self._host.check(self._weights, _given(command))
                return "the weights fit"
            case "sleep":
                return await self._sleep()
            case "wake_up":
                return await self._wake_up()
            case "update_weights":
                return await self._update(_given(command), _bounded(command.timeout_s))
            case "restore_weights":
                return await self._restore(_bounded(command.timeout_s))
            case _:
                raise ValueError(f"{command.action} is no action of a model")

    async def publish(self) -> None:
        """Show the routers that the model has changed, a moment after the answer to the command was sent. Do nothing
        without a change.

        Routers close their connections when they learn from the registry that the generation has changed, so the answer
        is sent first. A router that has lost the answer knows the result, but not its text.
        """
        if self._is_changed:
            self._is_changed = False
            await asyncio.sleep(self._publish_delay_s)
            reason = PAUSE_REASON if self.state == "paused" else ""
            await self._host.publish(is_sleeping=self.state == "sleeping", pause_reason=reason)

    def close(self) -> None:
        """Cancel the timer that ends a pause by itself."""
        if self._lease is not None:
            self._lease.cancel()

    async def _pause(self, timeout_s: float) -> str:
        self._require("serving", "pause")
        # The end of a command would end the drain too, and the operator who drains expects no new requests.
        if self._host.is_draining:
            raise ModelConflict("the instance drains")
        self.state = "pausing"
        self._host.pause(PAUSE_REASON)
        is_idle = False
        try:
            is_idle = await self._host.idle(timeout_s)
        # If the process stops, the pause must not outlive this task.
        finally:
            num_running = self._host.num_requests
            if not is_idle:
                self._end_pause()
        if not is_idle:
            raise ModelConflict(f"{num_running} requests still run after {timeout_s:g} s")
        # Other instances may have to wait longer for their requests, so their time is added.
        self._begin_lease(timeout_s)
        return "paused"

    def _resume(self) -> str:
        if self.state == "paused":
            self._end_pause()
        return "resumed" if self.state == "serving" else f"not paused: {self.state}"

    def _begin_lease(self, timeout_s: float) -> None:
        self.state = "paused"
        self._lease = asyncio.get_running_loop().call_later(timeout_s + self._pause_lease_s, self._end_lease)

    def _end_lease(self) -> None:
        logger.warning("no command followed a pause: this instance accepts requests again")
        self._end_pause()

    def _end_pause(self) -> None:
        self.close()
        self.state = "serving"
        self._host.resume()

    async def _sleep(self) -> str:
        await self._unload("sleep", "the model sleeps: an operator must wake it up (POST /wake_up)")
        self.state = "sleeping"
        return "sleeping"

    async def _wake_up(self) -> str:
        self._require("sleeping", "wake_up")
        self.state = "loading"
        try:
            await self._host.load(self._weights)
        # Also after a cancellation: the host has closed what it had loaded.
        except BaseException:
            self.state = "sleeping"
            raise
        self.state, self._is_changed = "serving", True
        return "awake"

    async def _update(self, weights: WeightsSource, timeout_s: float) -> str:
        self._require("paused", "update_weights")
        # Checked again: files may have changed since the router asked for a check, which costs milliseconds.
        await self._host.check(self._weights, weights)
        await self._unload("update_weights", "the instance loads new weights")
        try:
            await self._host.load(weights)
        except LOAD_FAILURES as exc:
            before = self._weights
            logger.warning("cannot load the weights in %s, loading %s again: %s", weights.model, before.model, exc)
            await self._load_or_give_up(timeout_s)
            raise
        self._previous, self._weights = self._weights, weights
        self._begin_lease(timeout_s)
        return f"loaded {weights.model}"

    async def _restore(self, timeout_s: float) -> str:
        if self._previous is None:
            raise ModelConflict("restore_weights: no weights were updated")
        await self._unload("restore_weights", "the instance loads its previous weights")
        self._weights, self._previous = self._previous, None
        await self._load_or_give_up(timeout_s)
        return f"loaded {self._weights.model}"

    async def _unload(self, action: str, reason: str) -> None:
        """Free the model of a paused instance, which then refuses requests with `reason`. Raises `ModelConflict`, with
        the command's name `action`, if it is not paused.
        """
        self._require("paused", action)
        self.close()
        self.state = "loading"
        await self._host.unload(reason)
        self._is_changed = True

    async def _load_or_give_up(self, timeout_s: float) -> None:
        """Load weights again that were loaded before. If that fails, the process ends, and its supervisor restarts it.
        After it, the instance is paused for up to `timeout_s` seconds more.
        """
        try:
            await self._host.load(self._weights)
        except LOAD_FAILURES as exc:
            self._host.give_up(f"the weights in {self._weights.model} cannot be loaded again: {exc}")
            raise
        self._begin_lease(timeout_s)

    def _require(self, state: ModelState, action: str) -> None:
        if self.state != state:
            raise ModelConflict(f"{action} needs the state {state}; this instance is in the state {self.state}")


def _given(command: EngineCommand) -> WeightsSource:
    if command.weights is None:
        raise ModelConflict(f"{command.action} names no weights")
    return command.weights


def _bounded(timeout_s: float) -> float:
    """Return `timeout_s`, a time in seconds that came over the network, limited to the range from 0 to
    `MAX_PAUSE_S`.
    """
    return min(max(timeout_s, 0.0), MAX_PAUSE_S)

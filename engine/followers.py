"""Prompts that are read behind another instance: from their reservation to the step that reads behind it. Pure.

A part of a prompt of which this engine computes an earlier part too begins when that is computed, or was launched.
"""

import logging
from collections.abc import Iterator
from typing import Protocol

from contracts.identity import RequestId
from engine.front import Gate
from engine.outputs import CompletedBlocks
from engine.reservations import Reservations
from engine.roster import Roster
from engine.sequence import State

logger = logging.getLogger(__name__)


class Gates(Protocol):
    """`engine.layer_calls.LayerCalls`."""

    def follow(self, request_id: RequestId, gate: Gate) -> None: ...
    def forget(self, request_id: RequestId) -> None: ...
    def lost(self) -> list[RequestId]: ...


class Followers:
    def __init__(self, roster: Roster, reservations: Reservations, layers: Gates) -> None:
        self._roster = roster
        self._reservations = reservations
        self._layers = layers
        self._waiting: dict[RequestId, tuple[int, Gate]] = {}
        """For an earlier part."""

    def follow(self, request_id: RequestId, num_tokens: int, gate: Gate, now: float) -> bool:
        """False: once what it awaits is computed."""
        request = self._roster.requests.get(request_id)
        if request is not None and request.sequences[0].state is not State.RESERVED:
            return True
        if request is not None and request.awaited:
            self._waiting[request_id] = num_tokens, gate
            return False
        self._start(request_id, num_tokens, gate, now)
        return True

    def share(self, now: float) -> Iterator[CompletedBlocks]:
        """After a step was launched: what reserved requests have in common with it is theirs too, and those that
        waited for it begin."""
        yield from self._reservations.share()
        for request_id in [one for one in self._waiting if not self._roster.requests[one].awaited]:
            num_tokens, gate = self._waiting.pop(request_id)
            self._start(request_id, num_tokens, gate, now)

    def read_alone(self, request_id: RequestId, now: float) -> bool:
        """As `Reservations.read_alone`. One whose step was launched, or waits for nothing any more, goes on."""
        request = self._roster.requests.get(request_id)
        is_reserved = request is None or request.sequences[0].state is State.RESERVED
        if not is_reserved and request_id not in self._layers.lost():
            return True
        is_read = self._reservations.read_alone(request_id, now)
        if is_read:
            self.forget(request_id)
        return is_read

    def drop_lost(self, now: float) -> None:
        """Before a step is planned."""
        for request_id in self._layers.lost():
            logger.warning("what is missing is computed here", extra={"request_id": request_id})
            self.read_alone(request_id, now)

    def forget(self, request_id: RequestId) -> None:
        self._waiting.pop(request_id, None)
        self._layers.forget(request_id)

    def _start(self, request_id: RequestId, num_tokens: int, gate: Gate, now: float) -> None:
        self._reservations.follow(request_id, num_tokens, now)
        if not gate.is_open:
            self._layers.follow(request_id, gate)

"""A sequence whose first blocks another instance fills while this one computes what follows them.

The two go through the same layers at the same time, this one behind: before a layer reads the blocks, their part of it
has arrived. The engine's thread waits for that inside its step, for as long as the other instance takes for a layer.
"""

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.executor import AfterLayer

PATIENCE_S = 3600.0


class FrontLostError(Exception):
    """What was to come before a sequence's own tokens will not come. The message says why."""


class Gate:
    """How many of the layers have arrived, of all blocks before the sequence's own tokens.

    One thread tells, the engine's waits, at most until `patience_s` from now. Who tells must say `lost` in the end if
    not all layers came, and only when nothing writes to the blocks any more: the engine computes them then."""

    def __init__(self, num_layers: int, *, patience_s: float = PATIENCE_S) -> None:
        self._num_layers = num_layers
        self._until = time.monotonic() + patience_s
        self._arrived = 0
        self._lost: str | None = None
        self.waited_s = 0.0
        """By the engine's thread."""
        self._changed = threading.Condition()

    @property
    def is_open(self) -> bool:
        return self._arrived == self._num_layers

    @property
    def is_lost(self) -> bool:
        return self._lost is not None and not self.is_open

    def reached(self, groups: int, of: int) -> None:
        """`groups` of so many equal groups of layers are here."""
        with self._changed:
            self._arrived = max(self._arrived, groups * self._num_layers // of)
            self._changed.notify_all()

    def lost(self, reason: str) -> None:
        """No further layer will come. Changes nothing if all are here."""
        with self._changed:
            self._lost = reason
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """Until this layer may be read. Raises `FrontLostError`."""
        if self._arrived > layer:
            return
        with self._changed:
            since = time.monotonic()
            rest_s = max(0.0, self._until - since)
            self._changed.wait_for(lambda: self._arrived > layer or self._lost is not None, rest_s)
            self.waited_s += time.monotonic() - since
            if self._arrived <= layer:
                self._lost = self._lost or f"layer {layer} did not come in time"
                raise FrontLostError(self._lost)


def behind(gates: Sequence[Gate], num_layers: int, then: "AfterLayer | None") -> "AfterLayer":
    """What to call after each layer of a step that reads behind these gates, once the first layer may be computed.

    `then` is called first. Raises `FrontLostError`, as does what is returned.
    """
    for gate in gates:
        gate.wait(0)

    def after_layer(layer: int) -> None:
        if then is not None:
            then(layer)
        if layer + 1 < num_layers:
            for gate in gates:
                gate.wait(layer + 1)

    return after_layer

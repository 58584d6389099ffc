"""A prompt's last blocks, told of group by group of layers: they can leave while later layers are still computed.

On a device the host is ahead: a thread waits for each group's event. On hosts a layer is complete when it returns.
"""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from engine import device as devices
from engine.outputs import CompletedBlocks, CompletedPart

Tell = Callable[[CompletedPart], object]


def parts_of(num_layers: int, asked: int) -> int:
    """The most equal groups of layers, up to `asked`."""
    return max(count for count in range(1, min(asked, num_layers) + 1) if num_layers % count == 0)


class Tail:
    """`parts` divides `num_layers`. `tell` is called in the engine's thread or in one of this object's own."""

    def __init__(self, num_layers: int, parts: int, device: torch.device, tell: Tell) -> None:
        self._layers_each = num_layers // parts
        self._device = device
        self._tell = tell
        self._waiting: SimpleQueue[tuple[devices.DeviceEvent, CompletedPart] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        if not devices.is_host(device):
            self._thread = threading.Thread(target=self._wait, name="tail", daemon=True)
            self._thread.start()

    def follow(self, blocks: Sequence[CompletedBlocks]) -> Callable[[int], None]:
        """To be called in a step that completes `blocks`, after the work of each layer was given to the device."""

        def after_layer(layer: int) -> None:
            part, rest = divmod(layer + 1, self._layers_each)
            if rest == 0:
                self._reached(CompletedPart(part - 1, list(blocks)))

        return after_layer

    def close(self) -> None:
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()

    def _reached(self, part: CompletedPart) -> None:
        if self._thread is None:
            self._tell(part)
        else:
            self._waiting.put((devices.record(self._device), part))

    def _wait(self) -> None:
        while (reached := self._waiting.get()) is not None:
            event, part = reached
            event.synchronize()
            self._tell(part)

"""A prompt's last blocks, told of group by group of layers: they can leave while later layers are still computed.

On a device the host is ahead: a thread waits for each group's event. On hosts a layer is complete when it returns.
Few blocks can be told of in larger groups, or whole: a message of little costs as much as it saves.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from baton_serve.contracts.layout import KVLayout
from baton_serve.engine import device as devices
from baton_serve.engine.core.outputs import CompletedBlocks, CompletedLayerGroups

OnLayerGroup = Callable[[CompletedLayerGroups], object]
MIN_REPORT_BYTES = 4 << 20
"""0.1 ms over pinned memory, as long as a message takes the hosts."""


def num_layer_groups(num_layers: int, asked: int) -> int:
    """The most equal groups of layers, up to `asked`."""
    return max(count for count in range(1, min(asked, num_layers) + 1) if num_layers % count == 0)


@dataclass(frozen=True, slots=True)
class LayerGroupPlan:
    parts: int
    """A divisor of the layers."""
    min_report_bytes: int = 1


def plan_layer_groups(
    asked: int | None, layout: KVLayout, device: torch.device, *, is_mirrored: bool
) -> LayerGroupPlan:
    """`asked` None: as the device's copies allow. Blocks that pass through a mirror in host memory leave whole."""
    if is_mirrored:
        return LayerGroupPlan(1)
    parts = num_layer_groups(layout.num_layers, asked or devices.defaults(device).tail_parts)
    return LayerGroupPlan(parts, 1 if asked else MIN_REPORT_BYTES)


def num_groups_per_report(parts: int, num_bytes: int, min_report_bytes: int) -> int:
    """So many of the parts of a request's `num_bytes` are worth a message."""
    return parts if not num_bytes else min(parts, -(-min_report_bytes * parts // num_bytes))


class LayerGroupReporter:
    """`tell` is called in the engine's thread or in one of this object's own, with `plan.min_report_bytes` of a
    request or more at once."""

    def __init__(self, layout: KVLayout, plan: LayerGroupPlan, device: torch.device, tell: OnLayerGroup) -> None:
        self._layers_each = layout.num_layers // plan.parts
        self._parts = plan.parts
        self._block_bytes = layout.block_bytes
        self._min_report_bytes = plan.min_report_bytes
        self._device = device
        self._tell = tell
        self._waiting: SimpleQueue[tuple[devices.DeviceEvent, CompletedLayerGroups] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        if not devices.is_host(device):
            self._thread = threading.Thread(target=self._wait, name="tail", daemon=True)
            self._thread.start()

    def follow(self, completed: Sequence[CompletedBlocks]) -> Callable[[int], None] | None:
        """To be called in a step that completes these blocks, after the work of each layer was given to the device.
        None: they are too few."""
        groups: dict[int, list[CompletedBlocks]] = {}
        for blocks in completed:
            at_once = num_groups_per_report(self._parts, len(blocks.blocks) * self._block_bytes, self._min_report_bytes)
            if at_once < self._parts:
                groups.setdefault(at_once, []).append(blocks)

        def after_layer(layer: int) -> None:
            reached, rest = divmod(layer + 1, self._layers_each)
            if rest:
                return
            for at_once, blocks in groups.items():
                behind = reached % at_once or at_once if reached == self._parts else at_once
                if reached % at_once == 0 or reached == self._parts:
                    self._reached(CompletedLayerGroups(range(reached - behind, reached), blocks))

        return after_layer if groups else None

    def close(self) -> None:
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()

    def _reached(self, part: CompletedLayerGroups) -> None:
        if self._thread is None:
            self._tell(part)
        else:
            self._waiting.put((devices.record(self._device), part))

    def _wait(self) -> None:
        while (reached := self._waiting.get()) is not None:
            event, part = reached
            event.synchronize()
            self._tell(part)

"""Decides into how many layer groups a prompt's last chunk is divided, and reports each, so that transfer overlaps with
computation.

On a device the host runs ahead, so a thread waits for an event of each group. On hosts a layer is complete when its
function returns. Small amounts are reported in larger groups, or as whole blocks, since a message has a fixed cost.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from queue import SimpleQueue

import torch

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.engine import device as devices
from baton_serve.engine.core.outputs import CompletedBlocks, CompletedLayerGroups

OnLayerGroup = Callable[[CompletedLayerGroups], object]
"""Receives each report, in the engine's thread or the reporter's."""
MIN_REPORT_BYTES = 4 << 20
"""Smallest amount that is worth a message, in bytes.

It takes 0.1 ms over pinned memory, which is about the time that both hosts spend on a message.
"""


PIECE_BYTES = 256
"""Alignment of groups in a block whose layers have different sizes, in bytes."""


def num_layer_groups(num_layers: int, asked: int) -> int:
    """Return the number of groups of equal size into which the layers are divided: the largest divisor of `num_layers`
    that is at most `asked`."""
    return max(count for count in range(1, min(asked, num_layers) + 1) if num_layers % count == 0)


@dataclass(frozen=True, slots=True)
class LayerGroupPlan:
    """Into how many groups the model's layers are divided, and how large a report of computed groups must be. The KV of
    a group is sent to another instance while later layers are computed."""

    parts: int
    """Number of groups; a divisor of the number of layers, and of the bytes of a block."""
    min_report_bytes: int = 1
    """Smallest amount of one report, in bytes."""


def plan_layer_groups(asked: int | None, layout: KVLayout, device: torch.device, *, is_divided: bool) -> LayerGroupPlan:
    """Choose into how many groups the layers are divided. `asked` is the setting `tail_parts`; None takes the device's
    default and avoids small reports.

    With `is_divided`, other ranks compute layers or copy their part of a block to a mirror, and there is one group.
    With recurrent states too: they are sent after the last layer. With cache groups too: a block has
    few layers. Groups are equal shares of a block's bytes, so that
    their borders may lie within a layer if the layers have different shapes.
    """
    if is_divided or layout.state_bytes or layout.num_groups > 1:
        return LayerGroupPlan(1)
    limit = min(asked or devices.defaults(device).tail_parts, layout.num_layers)
    if len(layout.runs) == 1:
        parts = num_layer_groups(layout.num_layers, limit)
    else:
        parts = max(n for n in range(1, limit + 1) if n == 1 or layout.block_bytes % (n * PIECE_BYTES) == 0)
    return LayerGroupPlan(parts, 1 if asked else MIN_REPORT_BYTES)


def num_groups_per_report(parts: int, num_bytes: int, min_report_bytes: int) -> int:
    """Return how many of the `parts` layer groups to put into one report, so that the report covers at least
    `min_report_bytes`. The request's blocks have `num_bytes` in all."""
    return parts if not num_bytes else min(parts, -(-min_report_bytes * parts // num_bytes))


class LayerGroupReporter:
    """Calls `on_group` when groups of layers of a prompt's last chunk are computed. The engine owns it and must call
    `close`.

    `on_group` is called in the engine's thread on the CPU, and in this object's thread on other devices. Reports of a
    request cover at least `plan.min_report_bytes`.
    """

    def __init__(self, layout: KVLayout, plan: LayerGroupPlan, device: torch.device, on_group: OnLayerGroup) -> None:
        sizes = [shape.num_elements(layout) for num_layers, shape in layout.runs for _ in range(num_layers)]
        ends, total = [0, *accumulate(sizes)], sum(sizes)
        self._reached_after = [end * plan.parts // total for end in ends]
        """By number of computed layers: how many groups are complete."""
        self._parts = plan.parts
        self._block_bytes = layout.block_bytes
        self._min_report_bytes = plan.min_report_bytes
        self._device = device
        self._on_group = on_group
        self._waiting: SimpleQueue[tuple[devices.DeviceEvent, CompletedLayerGroups] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        if not devices.is_host(device):
            self._thread = threading.Thread(target=self._wait, name="tail", daemon=True)
            self._thread.start()

    def follow(self, completed: Sequence[CompletedBlocks]) -> Callable[[int], None] | None:
        """Return a function for the forward pass of a step that completes these blocks. The caller calls it with each
        layer's index when the layer's kernels were queued; it reports each finished group, whose transfer can start
        before the step ends.

        Return None if the blocks are too few to be reported in groups.
        """
        groups: dict[int, list[CompletedBlocks]] = {}
        for blocks in completed:
            at_once = num_groups_per_report(self._parts, len(blocks.blocks) * self._block_bytes, self._min_report_bytes)
            if at_once < self._parts:
                groups.setdefault(at_once, []).append(blocks)

        def after_layer(layer: int) -> None:
            before, reached = self._reached_after[layer], self._reached_after[layer + 1]
            for at_once, blocks in groups.items():
                # Requests of one step may have different sizes, and so different numbers of groups per report. The last
                # report of a request holds the groups that are left.
                end = reached if reached == self._parts else reached - reached % at_once
                start = before - before % at_once
                if start < end:
                    self._reached(CompletedLayerGroups(range(start, end), blocks))

        return after_layer if groups else None

    def close(self) -> None:
        """Report the groups that the device is still computing when they are done, and end the thread."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()

    def _reached(self, part: CompletedLayerGroups) -> None:
        """Report layer groups whose kernels were just queued: immediately on the CPU, on other devices when they have
        run."""
        if self._thread is None:
            self._on_group(part)
        else:
            self._waiting.put((devices.record(self._device), part))

    def _wait(self) -> None:
        """Run the reporting thread: wait for the event of each queued report and pass the report on, until None
        arrives."""
        while (reached := self._waiting.get()) is not None:
            event, part = reached
            # Events end in the order in which they were recorded, so one thread is enough.
            event.synchronize()
            self._on_group(part)

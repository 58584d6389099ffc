"""What happens between the layers of a step: its prompts' last blocks are told of, and fronts are waited for."""

from dataclasses import dataclass

import torch

from contracts.identity import RequestId
from contracts.layout import KVLayout
from engine.executor import AfterLayer
from engine.front import Gate, behind
from engine.scheduler import Plan, Scheduler
from engine.tail import Tail, TailPlan, Tell


@dataclass(frozen=True, slots=True)
class Calls:
    """`after_layer`: as in `StepInputs`. `gates`: of those of the plan that read behind another instance."""

    after_layer: AfterLayer | None
    gates: dict[RequestId, Gate]


class LayerCalls:
    """Owns the tail's thread until `close`."""

    def __init__(self, plan: TailPlan, layout: KVLayout, device: torch.device) -> None:
        self._plan = plan
        self._layout = layout
        self._device = device
        self._tail: Tail | None = None
        self._gates: dict[RequestId, Gate] = {}

    @property
    def tail_parts(self) -> int:
        return self._plan.parts

    @property
    def reads_behind(self) -> bool:
        """Going the same way as another instance layer by layer is of use."""
        return self._plan.parts > 1

    @property
    def has_gates(self) -> bool:
        return bool(self._gates)

    def tell(self, tell: Tell) -> None:
        if self._plan.parts > 1:
            self._tail = Tail(self._layout, self._plan, self._device, tell)

    def follow(self, request_id: RequestId, gate: Gate) -> None:
        """The next step of this request is computed behind `gate`."""
        self._gates[request_id] = gate

    def forget(self, request_id: RequestId) -> None:
        self._gates.pop(request_id, None)

    def lost(self) -> list[RequestId]:
        """Those whose gate will not open."""
        return [request_id for request_id, gate in self._gates.items() if gate.is_lost]

    def begin(self, plan: Plan, scheduler: Scheduler) -> Calls:
        """Returns when the plan's first layer may be computed. The gates stay until `forget`. Raises `FrontLostError`;
        so does what is to be called."""
        after_layer = self._tail.follow(scheduler.tails(plan)) if self._tail is not None else None
        if not self._gates:
            return Calls(after_layer, {})
        ids = [chunk.sequence.request.work.request_id for chunk in plan.chunks]
        gates = {request_id: self._gates[request_id] for request_id in ids if request_id in self._gates}
        if not gates:
            return Calls(after_layer, {})
        return Calls(behind(list(gates.values()), self._layout.num_layers, after_layer), gates)

    def close(self) -> None:
        if self._tail is not None:
            self._tail.close()

"""Stands in for what waits for other instances' layers."""

from contracts.identity import RequestId
from engine.front import Gate


class Gates:
    """`engine.followers.Gates`."""

    def __init__(self) -> None:
        self.gates: dict[RequestId, Gate] = {}

    def follow(self, request_id: RequestId, gate: Gate) -> None:
        self.gates[request_id] = gate

    def forget(self, request_id: RequestId) -> None:
        self.gates.pop(request_id, None)

    def lost(self) -> list[RequestId]:
        return [request_id for request_id, gate in self.gates.items() if gate.is_lost]

"""Registry and connections of a simulated cluster, with the interfaces that the router's `Cluster` expects."""

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import count

import msgspec

from baton_serve.bench.simulation.cost import CostModel
from baton_serve.bench.simulation.fabric import Fabric
from baton_serve.bench.simulation.instance import SimulatedInstance
from baton_serve.bench.simulation.measures import Gaps
from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.events import EventBatch
from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.contracts.instance import InstanceRecord, Load, Role
from baton_serve.contracts.messages import ToInstance, ToRouter
from baton_serve.engine.core.block_pool import BlockPool

REPORT_S = 1.0
"""Interval of load reports: the router's heartbeat interval."""


class _Link:
    """Connection to a simulated instance: messages are direct calls."""

    def __init__(self, instance: SimulatedInstance, on_message: Callable[[ToRouter], None]) -> None:
        self._instance = instance
        self._on_message = on_message

    async def start(self) -> None:
        self._instance.router = self._on_message
        self._instance.report()

    def prepare(self, message: ToInstance) -> Callable[[], None]:
        return partial(self._instance.on_message, message)

    async def close(self) -> None:
        self._instance.router = None


class _Subscriber:
    """Subscription to the block events of a simulated instance."""

    def __init__(self, instance: SimulatedInstance, on_batch: Callable[[EventBatch], None]) -> None:
        self._instance = instance
        self._on_batch = on_batch

    async def start(self) -> None:
        self._instance.subscriber = self._on_batch

    def rebase(self, sequence: int) -> None:
        """Do nothing: events are never lost here."""

    async def close(self) -> None:
        self._instance.subscriber = None


class SimulatedCluster:
    """Registry view and connector of the simulation. `add` and `drain` create and remove instances."""

    def __init__(self, cost: CostModel, *, block_tokens: int, gaps: Gaps, num_sharers: int = 0) -> None:
        """Create an empty cluster. With `num_sharers`, that many prefill instances share one cache with the sum of
        their sizes: a bound for any placement, as if each block were everywhere and transfers were free."""
        self.instances: dict[InstanceId, SimulatedInstance] = {}
        self.gone: list[SimulatedInstance] = []
        self._cost = cost
        self._gaps = gaps
        # A layout with one head of one layer is enough: the simulation uses only the bytes per token.
        self._layout = KVLayout(
            fingerprint="simulated",
            num_layers=1,
            num_kv_heads=1,
            block_tokens=block_tokens,
            head_dim=max(1, cost.kv_bytes_per_token // 2),
            dtype="int8",
        )
        self._fabric = Fabric(bytes_per_token=cost.kv_bytes_per_token, bytes_per_s=cost.link_bytes_per_s)
        # A pool never allocates block 0.
        self._num_blocks = cost.kv_tokens // block_tokens
        self._shared = BlockPool(self._num_blocks * num_sharers + 1) if num_sharers else None
        self._sharers: list[SimulatedInstance] = []
        self._numbers: dict[Role, count[int]] = {}
        self._on_change: Callable[[], None] = lambda: None
        self._loop = asyncio.get_running_loop()
        self._loop.call_later(REPORT_S, self._report)

    def pool(self, role: Role) -> list[SimulatedInstance]:
        """Return the instances of a role that accept new work."""
        return [i for i in self.instances.values() if i.record.role == role and not i.record.draining]

    def add(self, role: Role) -> None:
        """Start an instance of this role."""
        number = next(self._numbers.setdefault(role, count()))
        name = InstanceId(f"{role}-{number:04}")
        record = InstanceRecord(
            instance=name,
            generation=Generation(1),
            role=role,
            model="simulated",
            layout=self._layout,
            max_model_len=self._num_blocks * self._layout.block_tokens,
            rpc_address="",
            transfer_address="",
            events_address="",
            http_address="",
            host=name,
            load=Load(free_blocks=self._num_blocks, total_blocks=self._num_blocks),
        )
        is_shared = role == "prefill" and self._shared is not None
        pool = self._shared if is_shared and self._shared is not None else BlockPool(self._num_blocks + 1)
        instance = SimulatedInstance(record, self._cost, self._fabric, self._gaps, pool)
        if is_shared:
            self._sharers.append(instance)
            instance.sharers = self._sharers
        self.instances[name] = instance
        self._on_change()

    def drain(self, instance: SimulatedInstance) -> None:
        """Give the instance no new work; `_report` removes it once its work has ended."""
        instance.record = msgspec.structs.replace(instance.record, draining=True)
        self._on_change()

    def check_idle(self) -> None:
        """Assert that no request has left anything behind: all blocks are free and no handoff is open."""
        for instance in self.instances.values():
            assert instance.is_idle, f"{instance.record.instance} still has work"
            instance.engine.table.check_invariants()
        assert not self._fabric.num_handoffs

    async def start(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change

    def records(self) -> list[InstanceRecord]:
        return [self.instances[name].record for name in sorted(self.instances)]

    def is_connected(self) -> bool:
        return True

    async def close(self) -> None:
        self._on_change = lambda: None

    def link(
        self, record: InstanceRecord, on_message: Callable[[ToRouter], None], on_lost: Callable[[str], None]
    ) -> _Link:
        return _Link(self.instances[record.instance], on_message)

    def subscriber(
        self, record: InstanceRecord, on_batch: Callable[[EventBatch], None], on_gap: Callable[[], None]
    ) -> _Subscriber:
        return _Subscriber(self.instances[record.instance], on_batch)

    def _report(self) -> None:
        """Remove drained instances and send load reports, every `REPORT_S`."""
        left = [name for name, i in self.instances.items() if i.record.draining and i.is_idle]
        for name in left:
            self.instances[name].ended_at = self._loop.time()
            self.gone.append(self.instances.pop(name))
        if left:
            self._on_change()
        for instance in self.instances.values():
            instance.report()
        self._loop.call_later(REPORT_S, self._report)

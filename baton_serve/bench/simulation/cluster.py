"""The registry and the connections of a simulated cluster, as the router's `Cluster` expects them."""

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import count

import msgspec

from baton_serve.bench.simulation.cache import BlockCache
from baton_serve.bench.simulation.cost import CostModel
from baton_serve.bench.simulation.fabric import Fabric
from baton_serve.bench.simulation.instance import SimulatedInstance
from baton_serve.bench.simulation.measures import Gaps
from baton_serve.contracts.events import EventBatch
from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.contracts.instance import InstanceRecord, Load, Role
from baton_serve.contracts.layout import KVLayout
from baton_serve.contracts.messages import ToInstance, ToRouter

REPORT_S = 1.0
"""As often as routers ask."""


class _Link:
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
    def __init__(self, instance: SimulatedInstance, on_batch: Callable[[EventBatch], None]) -> None:
        self._instance = instance
        self._on_batch = on_batch

    async def start(self) -> None:
        self._instance.subscriber = self._on_batch

    def rebase(self, sequence: int) -> None:
        """No event is ever lost here."""

    async def close(self) -> None:
        self._instance.subscriber = None


class SimulatedCluster:
    """View and connector in one. Instances come and go by `add` and `drain`."""

    def __init__(self, cost: CostModel, *, block_tokens: int, gaps: Gaps, num_sharers: int = 0) -> None:
        """With `num_sharers`, so many prefill instances have one cache of their sizes' sum, as if every block were
        everywhere and moving one cost nothing."""
        self.instances: dict[InstanceId, SimulatedInstance] = {}
        self.gone: list[SimulatedInstance] = []
        self._cost = cost
        self._gaps = gaps
        # One head of one layer: only the bytes of a token matter.
        self._layout = KVLayout(
            fingerprint="simulated",
            num_layers=1,
            num_kv_heads=1,
            block_tokens=block_tokens,
            head_dim=max(1, cost.kv_bytes_per_token // 2),
            dtype="int8",
        )
        self._fabric = Fabric(bytes_per_token=cost.kv_bytes_per_token, bytes_per_s=cost.link_bytes_per_s)
        self._shared = BlockCache(cost.kv_tokens // block_tokens * num_sharers) if num_sharers else None
        self._sharers: list[SimulatedInstance] = []
        self._numbers: dict[Role, count[int]] = {}
        self._on_change: Callable[[], None] = lambda: None
        self._loop = asyncio.get_running_loop()
        self._loop.call_later(REPORT_S, self._report)

    def pool(self, role: Role) -> list[SimulatedInstance]:
        """Those of the role that take new work."""
        return [i for i in self.instances.values() if i.record.role == role and not i.record.draining]

    def add(self, role: Role) -> None:
        number = next(self._numbers.setdefault(role, count()))
        name = InstanceId(f"{role}-{number:04}")
        total = self._cost.kv_tokens // self._layout.block_tokens
        record = InstanceRecord(
            instance=name,
            generation=Generation(1),
            role=role,
            model="simulated",
            layout=self._layout,
            max_model_len=self._cost.kv_tokens,
            rpc_address="",
            transfer_address="",
            events_address="",
            http_address="",
            host=name,
            load=Load(free_blocks=total, total_blocks=total),
        )
        is_shared = role == "prefill" and self._shared is not None
        cache = self._shared if is_shared and self._shared is not None else BlockCache(total)
        instance = SimulatedInstance(record, self._cost, self._fabric, self._gaps, cache)
        if is_shared:
            self._sharers.append(instance)
            instance.sharers = self._sharers
        self.instances[name] = instance
        self._on_change()

    def drain(self, instance: SimulatedInstance) -> None:
        """It takes no new work, and leaves when what runs has ended."""
        instance.record = msgspec.structs.replace(instance.record, draining=True)
        self._on_change()

    def check_idle(self) -> None:
        """Nothing is left of any request."""
        for instance in self.instances.values():
            instance.engine.cache.check_invariants()
            assert instance.is_idle, f"{instance.record.instance} still has work"
            assert instance.engine.cache.num_free == instance.engine.cache.num_total
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
        left = [name for name, i in self.instances.items() if i.record.draining and i.is_idle]
        for name in left:
            self.instances[name].ended_at = self._loop.time()
            self.gone.append(self.instances.pop(name))
        if left:
            self._on_change()
        for instance in self.instances.values():
            instance.report()
        self._loop.call_later(REPORT_S, self._report)

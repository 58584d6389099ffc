"""The real connections to instances, as `cluster` asks for them."""

from collections.abc import Callable

from contracts.events import EventBatch
from contracts.instance import InstanceRecord
from contracts.messages import ToRouter
from services.common.cluster_key import ClusterKey
from services.common.events import EventSubscriber
from services.common.rpc import InstanceLink


class ZeromqConnector:
    def __init__(self, *, instance_timeout_s: float, key: ClusterKey | None = None) -> None:
        self._key = key
        self._instance_timeout_s = instance_timeout_s

    def link(
        self, record: InstanceRecord, on_message: Callable[[ToRouter], None], on_lost: Callable[[str], None]
    ) -> InstanceLink:
        return InstanceLink(
            record.rpc_address,
            on_message=on_message,
            on_lost=on_lost,
            timeout_s=self._instance_timeout_s,
            key=self._key,
        )

    def subscriber(
        self, record: InstanceRecord, on_batch: Callable[[EventBatch], None], on_gap: Callable[[], None]
    ) -> EventSubscriber:
        return EventSubscriber(
            record.events_address, generation=record.generation, on_batch=on_batch, on_gap=on_gap, key=self._key
        )

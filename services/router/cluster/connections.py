"""The real connections to instances, as `cluster` asks for them."""

import asyncio
from collections.abc import Callable

import zmq

from baton_serve.contracts.events import EventBatch
from baton_serve.contracts.instance import InstanceRecord
from baton_serve.contracts.messages import ToRouter
from baton_serve.services.common.cluster_key import ClusterKey
from baton_serve.services.common.zmq.block_events import EventSubscriber
from baton_serve.services.common.zmq.rpc import InstanceLink

MAX_ZMQ_SOCKETS = 65_535
"""ZeroMQ's own limit of 1,023 would do for 340 instances."""


class ZeromqConnector:
    """All connections share one context: its thread wakes once for what several of them send or get at a time."""

    def __init__(self, *, instance_timeout_s: float, key: ClusterKey | None = None) -> None:
        self._key = key
        self._instance_timeout_s = instance_timeout_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_ZMQ_SOCKETS)

    async def close(self) -> None:
        """After every link and subscriber."""
        await asyncio.to_thread(self._context.term)

    def link(
        self, record: InstanceRecord, on_message: Callable[[ToRouter], None], on_lost: Callable[[str], None]
    ) -> InstanceLink:
        return InstanceLink(
            record.rpc_address,
            on_message=on_message,
            on_lost=on_lost,
            timeout_s=self._instance_timeout_s,
            key=self._key,
            context=self._context,
        )

    def subscriber(
        self, record: InstanceRecord, on_batch: Callable[[EventBatch], None], on_gap: Callable[[], None]
    ) -> EventSubscriber:
        return EventSubscriber(
            record.events_address,
            generation=record.generation,
            on_batch=on_batch,
            on_gap=on_gap,
            key=self._key,
            context=self._context,
        )

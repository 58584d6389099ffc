"""Opens the connections of a router process to instances."""

import asyncio
from collections.abc import Callable

import zmq

from baton_serve.contracts.events import EventBatch
from baton_serve.contracts.instance import InstanceRecord
from baton_serve.contracts.messages import ToRouter
from baton_serve.services.common.cluster_key import ClusterKey
from baton_serve.services.common.rpc.instance_link import InstanceLink
from baton_serve.services.common.zmq.block_events import EventSubscriber

MAX_ZMQ_SOCKETS = 65_535
"""Sockets of one context. The default of ZeroMQ, 1,023, is enough for only about 1,000 instances."""


class InstanceConnector:
    """Creates the connections of one router process to instances. `main` owns it and closes it last.

    All subscriptions share one ZeroMQ context, and so one I/O thread: it wakes up once for the messages of several
    connections, and not once for each.
    """

    def __init__(self, *, instance_timeout_s: float, key: ClusterKey | None = None) -> None:
        self._key = key
        self._instance_timeout_s = instance_timeout_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_ZMQ_SOCKETS)

    async def close(self) -> None:
        """Close the ZeroMQ context. Call it after every subscription was closed."""
        # `term` blocks until the last socket is closed, which must not happen on the event loop.
        await asyncio.to_thread(self._context.term)

    def link(
        self, record: InstanceRecord, on_message: Callable[[ToRouter], None], on_lost: Callable[[str], None]
    ) -> InstanceLink:
        """Return a connection to an instance for requests and answers, which the caller starts and closes. It calls
        `on_message` with each answer, and `on_lost` once, with the reason.
        """
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
        """Return a subscription to the cache events of an instance (blocks stored and evicted), which the caller starts
        and closes. It calls `on_batch` with each batch of events, and `on_gap` when a batch was lost.
        """
        return EventSubscriber(
            record.events_address,
            generation=record.generation,
            on_batch=on_batch,
            on_gap=on_gap,
            key=self._key,
            context=self._context,
        )

"""Copy the registry that the supervisor hosts to a registry in each router process.

Instances register at one address (`memory://…`), which only one process can host. Each router process hosts a further
registry, and the relay forwards every message to it, so that a process sees what a single router would see.
"""

import asyncio
import contextlib
import logging

from baton_serve.contracts.identity import InstanceId
from baton_serve.contracts.messages import Leave, Register
from baton_serve.services.common.cluster_key import ClusterKey
from baton_serve.services.common.errors import RegistryUnavailable, Superseded
from baton_serve.services.common.registry import RegistryClient, hosted_registry, registry_client

logger = logging.getLogger(__name__)


class RegistryRelay:
    """Hosts the registry of a router with several processes, and forwards the messages of instances to each of these
    processes.

    The supervisor process owns it, from its start to its end; it runs on the supervisor's event loop.
    """

    def __init__(self, url: str, workers: list[str], *, key: ClusterKey | None = None) -> None:
        """Create the relay without starting it. `url` is where instances connect; `workers` are the URLs of the router
        processes' own registries. `key` is the cluster's key, or None.
        """
        self._view = hosted_registry(url, self._on_message, key)
        self._forwarders = [_Forwarder(registry_client(worker, key)) for worker in workers]
        self._known: dict[InstanceId, Register] = {}

    async def start(self) -> None:
        """Start to host the registry and to forward messages. Raises `zmq.ZMQError` if the address is already in
        use.
        """
        await self._view.start(lambda: None)
        for sender in self._forwarders:
            sender.start()

    async def close(self) -> None:
        """Stop forwarding and close the registry. Messages that are not forwarded yet are dropped."""
        for sender in self._forwarders:
            await sender.close()
        await self._view.close()

    def send_all_records(self, index: int) -> None:
        """Forward the records of all instances to the router process `index`, which has just started and knows none of
        them.
        """
        for record in self._view.records():
            self._forwarders[index].put(self._known[record.instance])

    def _on_message(self, message: Register | Leave) -> None:
        if isinstance(message, Register):
            self._known[message.record.instance] = message
        else:
            self._known.pop(message.instance, None)
        for sender in self._forwarders:
            sender.put(message)


class _Forwarder:
    """Forwards messages of instances to one router process, in the order in which `put` gets them.

    Each process has its own queue, so that one that hangs does not delay the others.
    """

    def __init__(self, client: RegistryClient) -> None:
        self._client = client
        self._queue: asyncio.Queue[Register | Leave] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="registry-relay")

    def put(self, message: Register | Leave) -> None:
        self._queue.put_nowait(message)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._client.close()

    async def _run(self) -> None:
        while True:
            message = await self._queue.get()
            # A process that does not answer is about to be restarted. After its restart `send_all_records` brings it up
            # to date, so the message may be dropped. `Superseded` is raised for a record that is already out of date.
            with contextlib.suppress(RegistryUnavailable, Superseded):
                if isinstance(message, Register):
                    await self._client.register(message.record, message.ttl_s)
                else:
                    await self._client.leave(message.instance, message.generation)

"""One registry for instances, hosted by the process that keeps the workers, and one in each worker that is told the
same: a worker sees what a router alone would see.
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
    """`url` as instances are given it, `workers` as the workers host theirs."""

    def __init__(self, url: str, workers: list[str], *, key: ClusterKey | None = None) -> None:
        self._view = hosted_registry(url, self._on_message, key)
        self._forwarders = [_Forwarder(registry_client(worker, key)) for worker in workers]
        self._known: dict[InstanceId, Register] = {}

    async def start(self) -> None:
        """Raises `zmq.ZMQError` when the address is in use."""
        await self._view.start(lambda: None)
        for sender in self._forwarders:
            sender.start()

    async def close(self) -> None:
        for sender in self._forwarders:
            await sender.close()
        await self._view.close()

    def send_all_records(self, index: int) -> None:
        """A worker has just started."""
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
    """To one worker, in order."""

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
            # A worker that does not answer is being started again, and told all then.
            with contextlib.suppress(RegistryUnavailable, Superseded):
                if isinstance(message, Register):
                    await self._client.register(message.record, message.ttl_s)
                else:
                    await self._client.leave(message.instance, message.generation)

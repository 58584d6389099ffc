"""Instances without an engine for the router's connections: they register, send load reports and complete any
request at once.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import InstanceId, RequestId, new_generation
from baton_serve.contracts.instance import InstanceRecord, Load, Role
from baton_serve.contracts.messages import (
    Answer,
    Batch,
    Decode,
    Generate,
    HandoffReport,
    Heartbeat,
    LoadReport,
    Prefill,
    PrefillReport,
    Snapshot,
    SnapshotRequest,
    ToInstance,
    Tokens,
    Work,
)
from baton_serve.services.common.errors import RegistryUnavailable
from baton_serve.services.common.registry import registry_client
from baton_serve.services.common.rpc.instance_link import InstanceServer, RouterId
from baton_serve.services.common.zmq.block_events import EventPublisher

LAYOUT = KVLayout(fingerprint="bench", num_layers=2, num_kv_heads=2, block_tokens=64, head_dim=64, dtype="bfloat16")
"""KV layout that all fake instances report."""
MAX_MODEL_LEN = 131_072
LOAD = Load(free_blocks=100_000, total_blocks=100_000, prefill_tokens_per_s=1e6, decode_step_s=0.01)
"""Load that all fake instances report."""


@dataclass(slots=True)
class FakeStream:
    """A sequence for which `FakeInstance.step` generates tokens. `position` is that of the next token."""

    router: RouterId
    work: Work
    position: int


@dataclass
class FakeInstance:
    """One fake instance. `on_work` is called for each request that arrives. With `is_paced`, tokens are sent by
    `step`; otherwise an answer has all its tokens at once."""

    name: str
    role: Role
    model: str
    on_work: Callable[[Work], None]
    is_paced: bool = False
    streams: dict[RequestId, FakeStream] = field(default_factory=dict)

    async def start(self, registry: str) -> None:
        """Open the sockets and register with the registry; the registration is renewed until `close`."""
        instance, generation = InstanceId(self.name), new_generation()
        self._server = InstanceServer()
        self._events = EventPublisher(instance=instance, generation=generation)
        await self._events.start()
        await self._server.start(self._on_message, lambda _: None)
        self._report = LoadReport(instance=instance, generation=generation, load=LOAD)
        record = InstanceRecord(
            instance=instance,
            generation=generation,
            role=self.role,
            model=self.model,
            layout=LAYOUT,
            max_model_len=MAX_MODEL_LEN,
            rpc_address=self._server.address,
            transfer_address="tcp://127.0.0.1:1",
            events_address=self._events.address,
            http_address="127.0.0.1:1",
            host="bench",
            load=LOAD,
        )
        self._registry = registry_client(registry)
        self._renewing = asyncio.create_task(self._renew(record))

    async def close(self) -> None:
        self._renewing.cancel()
        await self._registry.close()
        await self._server.close()
        await self._events.close()

    def step(self) -> int:
        """Send one token of each stream, in one message per router. Return the number of tokens."""
        answers: dict[RouterId, list[Answer]] = {}
        for stream in list(self.streams.values()):
            answers.setdefault(stream.router, []).append(self._token(stream))
        for router, messages in answers.items():
            self._server.send(router, Batch(messages))
        return sum(map(len, answers.values()))

    def _token(self, stream: FakeStream) -> Tokens:
        work, position = stream.work, stream.position
        stream.position += 1
        is_last = stream.position >= work.sampling.max_tokens
        if is_last:
            del self.streams[work.request_id]
        return Tokens(
            request_id=work.request_id,
            sequence=0,
            position=position,
            token_ids=[_token_id(position)],
            finish_reason="length" if is_last else None,
        )

    async def _renew(self, record: InstanceRecord) -> None:
        while True:
            try:
                await self._registry.register(record, 30.0)
            except RegistryUnavailable:  # the router is still starting
                continue
            await asyncio.sleep(5.0)

    def _on_message(self, router: RouterId, message: ToInstance) -> None:
        match message:
            case Heartbeat():
                self._server.send(router, self._report)
            case SnapshotRequest():
                of = self._report
                self._server.send(
                    router, Snapshot(instance=of.instance, generation=of.generation, sequence=0, device=[])
                )
            case Prefill() | Decode() | Generate():
                self._serve(router, message)
            case _:
                self.streams.pop(getattr(message, "request_id", RequestId("")), None)

    def _serve(self, router: RouterId, message: Prefill | Decode | Generate) -> None:
        work = message.work
        self.on_work(work)
        if isinstance(message, Prefill):
            first = [_tokens(work, sequence, 0, 1) for sequence in work.sequences]
            self._server.send(
                router, Batch([PrefillReport(request_id=work.request_id, queue_s=0.0, prefill_s=0.0), *first])
            )
            return
        begin = 1 if isinstance(message, Decode) else 0
        answers: list[Answer] = [
            _handoff(work) if begin else PrefillReport(request_id=work.request_id, queue_s=0, prefill_s=0)
        ]
        if self.is_paced:
            self.streams[work.request_id] = FakeStream(router, work, begin)
        else:
            answers += [_tokens(work, i, begin, work.sampling.max_tokens) for i in work.sequences]
        self._server.send(router, Batch(answers))


def _tokens(work: Work, sequence: int, begin: int, end: int) -> Tokens:
    is_last = end >= work.sampling.max_tokens
    return Tokens(
        request_id=work.request_id,
        sequence=sequence,
        position=begin,
        token_ids=[_token_id(position) for position in range(begin, end)],
        finish_reason="length" if is_last else None,
    )


def _token_id(position: int) -> int:
    """Return printable ASCII characters of the demo model's vocabulary."""
    return 40 + position % 50


def _handoff(work: Work) -> HandoffReport:
    return HandoffReport(
        request_id=work.request_id,
        transport="none",
        handoff_s=0.001,
        exposed_s=0.0,
        transferred_blocks=1,
        reused_blocks=0,
        transferred_bytes=1,
    )

"""Prefill and decode instances as real processes, and a driver that speaks to them as a router does."""

import asyncio
import os
import select
import signal
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton_serve.bench.ports import free_port
from baton_serve.contracts.block_hash import root_hash
from baton_serve.contracts.identity import RequestId, new_ticket_id
from baton_serve.contracts.instance import InstanceRecord, Load
from baton_serve.contracts.messages import (
    Batch,
    Cancel,
    Decode,
    Failed,
    HandoffReport,
    Heartbeat,
    LoadReport,
    Prefill,
    PrefillReport,
    Snapshot,
    Ticket,
    Tokens,
    ToRouter,
    Work,
)
from baton_serve.contracts.sampling import SamplingSpec
from baton_serve.services.common.registry import RegistryView, registry_view
from baton_serve.services.common.rpc.instance_link import InstanceLink
from baton_serve.services.local.launches import RunningProcess
from baton_serve.services.local.plan import Process
from tests.devices import flags_of
from tests.e2e.cluster import environment
from tests.forking import forks

START_TIMEOUT_S = 180.0
DEADLINE_S = 30.0


@dataclass
class Answer:
    """Everything that the instances sent for one request."""

    tokens: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """By sequence: token by position."""
    reasons: dict[int, str] = field(default_factory=dict)
    prefill: PrefillReport | None = None
    handoff: HandoffReport | None = None
    failed: list[Failed] = field(default_factory=list)

    def has_begun(self, sequences: list[int]) -> bool:
        return all(0 in self.tokens[index] for index in sequences)

    def sequence(self, index: int = 0) -> list[int]:
        found = self.tokens[index]
        assert sorted(found) == list(range(len(found))), f"positions {sorted(found)}"
        return [found[position] for position in range(len(found))]


class Instance:
    """One process and the link to it."""

    def __init__(self, process: RunningProcess, record: InstanceRecord) -> None:
        self.process = process
        self.record = record
        self.load: Load | None = None
        self.lost: str | None = None
        self.link: InstanceLink | None = None

    def kill(self) -> None:
        self.process.signal(signal.SIGKILL)


class Driver:
    def __init__(self, view: RegistryView) -> None:
        self.view = view
        self.instances: dict[str, Instance] = {}
        self.answers: dict[RequestId, Answer] = defaultdict(Answer)
        self.sink = "decode-0"
        """The decode instance that gets what is handed off."""
        self._changed = asyncio.Event()
        self._num_requests = 0

    @property
    def prefill(self) -> Instance:
        return next(i for i in self.instances.values() if i.record.role == "prefill")

    @property
    def decode(self) -> Instance:
        return self.instances[self.sink]

    def changed(self) -> None:
        self._changed.set()

    async def until(self, fact: Callable[[], bool], what: str, timeout_s: float = DEADLINE_S) -> None:
        """Waits for a fact; looks at it whenever a message has come."""
        try:
            async with asyncio.timeout(timeout_s):
                while not fact():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            loads = {name: (i.load, i.lost) for name, i in self.instances.items()}
            raise AssertionError(f"not within {timeout_s} s: {what}; {loads}; {dict(self.answers)}") from None

    async def connect(self, process: RunningProcess, record: InstanceRecord) -> Instance:
        instance = Instance(process, record)

        def on_lost(reason: str) -> None:
            instance.lost = reason
            self.changed()

        instance.link = InstanceLink(
            record.rpc_address,
            on_message=lambda message: self._receive(instance, message),
            on_lost=on_lost,
            timeout_s=20.0,
        )
        await instance.link.start()
        self.instances[record.instance] = instance
        await self.until(lambda: instance.load is not None, "a first load report")
        return instance

    def work(self, prompt: list[int], *, n: int = 1, timeout_s: float = 60.0, **sampling: Any) -> Work:
        self._num_requests += 1
        layout = self.decode.record.layout
        params = {"seed": 11, "max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | sampling
        return Work(
            request_id=RequestId(f"request-{self._num_requests}"),
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=SamplingSpec(**params),
            root=root_hash(fingerprint=layout.fingerprint, kv_dtype=layout.dtype, block_tokens=layout.block_tokens),
            sequences=list(range(n)),
            timeout_s=timeout_s,
        )

    def ticket(self, timeout_s: float = DEADLINE_S) -> Ticket:
        source, sink = self.prefill.record, self.decode.record
        return Ticket(
            ticket=new_ticket_id(),
            source=source.instance,
            source_generation=source.generation,
            source_address=source.transfer_address,
            sink=sink.instance,
            sink_generation=sink.generation,
            timeout_s=timeout_s,
        )

    def send(self, instance: Instance, message: Any) -> None:
        assert instance.link is not None
        instance.link.send(message)

    def start(self, work: Work, ticket: Ticket | None = None) -> Answer:
        """Both halves at once, as a router sends them."""
        ticket = ticket or self.ticket()
        self.send(self.decode, Decode(work, ticket))
        self.send(self.prefill, Prefill(work, ticket))
        return self.answers[work.request_id]

    async def complete(self, work: Work) -> Answer:
        answer = self.start(work)
        sequences = len(work.sequences)
        await self.until(lambda: len(answer.reasons) == sequences or bool(answer.failed), "an answer")
        await self.until(lambda: answer.handoff is not None or bool(answer.failed), "the report of a handoff")
        await self.until(lambda: answer.has_begun(work.sequences) or bool(answer.failed), "the first tokens")
        assert not answer.failed
        return answer

    def cancel(self, work: Work) -> None:
        for instance in (self.prefill, self.decode):
            self.send(instance, Cancel(work.request_id))

    async def load_of(self, instance: Instance) -> Load:
        instance.load = None
        self.send(instance, Heartbeat())
        await self.until(lambda: instance.load is not None, "a load report")
        assert instance.load is not None
        return instance.load

    async def until_load(self, instance: Instance, fact: Callable[[Load], bool], what: str) -> None:
        deadline = asyncio.get_running_loop().time() + DEADLINE_S
        while not fact(load := await self.load_of(instance)):
            assert asyncio.get_running_loop().time() < deadline, f"not in time: {what}; {load}"
            await asyncio.sleep(0.01)

    async def until_idle(self) -> None:
        """Wait until nothing runs, waits or is held in any instance. A leak would keep it from returning."""
        for instance in self.instances.values():
            if instance.lost is None:
                await self.until_load(instance, is_idle, f"an idle {instance.record.instance}")

    def _receive(self, instance: Instance, message: ToRouter) -> None:
        for part in message.messages if isinstance(message, Batch) else [message]:
            self._note(instance, part)
        self.changed()

    def _note(self, instance: Instance, message: Any) -> None:
        match message:
            case Tokens():
                answer = self.answers[message.request_id]
                for offset, token in enumerate(message.token_ids):
                    position = message.position + offset
                    assert position not in answer.tokens[message.sequence], "a token was repeated"
                    answer.tokens[message.sequence][position] = token
                if message.finish_reason is not None:
                    answer.reasons[message.sequence] = message.finish_reason
            case PrefillReport():
                self.answers[message.request_id].prefill = message
            case HandoffReport():
                self.answers[message.request_id].handoff = message
            case Failed():
                self.answers[message.request_id].failed.append(message)
            case LoadReport():
                instance.load = message.load
            case Snapshot():
                pass


def is_idle(load: Load) -> bool:
    return load.free_blocks == load.total_blocks and not (load.running or load.waiting or load.held_blocks)


@asynccontextmanager
async def instances(
    model: Path, *flags: str, own: Mapping[str, tuple[str, ...]] = {"prefill-0": (), "decode-0": ()}
) -> AsyncIterator[Driver]:
    """Starts instances side by side, yields when all are registered, and ends them. `own`: flags by instance."""
    port = free_port()
    view = registry_view(f"memory://127.0.0.1:{port}")
    driver = Driver(view)
    await view.start(driver.changed)
    with tempfile.TemporaryFile("w+") as log:
        processes = {
            name: _spawn(name, model, port, (*flags_of(number), *flags, *more), log)
            for number, (name, more) in enumerate(own.items())
        }
        try:
            fact = lambda: {r.instance for r in view.records()} == set(own) or _any_ended(processes)  # noqa: E731
            await driver.until(fact, "all instances registered", START_TIMEOUT_S)
            for record in view.records():
                await driver.connect(processes[record.instance], record)
            yield driver
        except BaseException:
            log.seek(0)
            print(log.read())  # noqa: T201 - pytest shows it with the failure
            raise
        finally:
            for instance in driver.instances.values():
                assert instance.link is not None
                await instance.link.close()
            for process in processes.values():
                process.signal(signal.SIGKILL)
                process.wait()
            await view.close()


def _any_ended(processes: Mapping[str, RunningProcess]) -> bool:
    for name, process in processes.items():
        if select.select([process], [], [], 0)[0]:
            raise RuntimeError(f"{name} ended with status {process.wait()}")
    return False


def _spawn(name: str, model: Path, port: int, flags: tuple[str, ...], log: Any) -> RunningProcess:
    """Start an instance in the way of `baton serve`."""
    argv = [name.partition("-")[0], "--model", str(model), "--instance-id", name]
    argv += ["--dtype", "float32", "--registry", f"memory://127.0.0.1:{port}"]
    argv += ["--threads", "1", "--kv-cache-memory-bytes", str(8 << 20), "--max-num-seqs", "16", *flags]
    process = Process(name, argv, {"OMP_NUM_THREADS": "1"})
    return forks()(process, environment(), log.fileno(), log.fileno())


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

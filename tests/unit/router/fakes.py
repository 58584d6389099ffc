"""A cluster without processes: instances that speak contracts.messages over links that are function calls."""

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.events import BlocksStored, EventBatch
from baton_serve.contracts.identity import BlockHash, Generation, InstanceId, RequestId
from baton_serve.contracts.instance import AdapterRecord, InstanceRecord, LinkStatus, Load, Role
from baton_serve.contracts.messages import (
    AdapterChanged,
    Answer,
    Batch,
    Cancel,
    Decode,
    EngineCommand,
    EngineCommandDone,
    ErrorCode,
    Failed,
    Generate,
    HandoffReport,
    Heartbeat,
    LoadAdapter,
    LoadReport,
    Pool,
    Pooled,
    Prefill,
    PrefillReport,
    Snapshot,
    SnapshotRequest,
    Ticket,
    ToInstance,
    TokenLogprob,
    TokenLogprobs,
    Tokens,
    ToRouter,
    UnloadAdapter,
    Work,
)
from baton_serve.contracts.pooling import PoolingProfile
from baton_serve.contracts.prompt_logprobs import encode_logprobs
from baton_serve.contracts.wire import encode
from baton_serve.services.router.cluster.worker_state import WorkerState
from baton_serve.services.router.placement.policy import Placement
from baton_serve.services.router.requests.attempt import Attempt

LAYOUT = KVLayout(fingerprint="tiny", num_layers=2, num_kv_heads=1, block_tokens=4, head_dim=8, dtype="float32")

TokenOf = Callable[[Work, int, int], int]
"""(work, sequence, position) -> token id: like real sampling it depends on nothing else."""


def letters(work: Work, sequence: int, position: int) -> int:
    return 97 + (work.sampling.seed + 5 * sequence + position * 7) % 26


def record(
    instance: str,
    role: Role,
    *,
    generation: int = 1,
    load: Load | None = None,
    layout: KVLayout = LAYOUT,
    max_model_len: int = 256,
    pooling: PoolingProfile | None = None,
) -> InstanceRecord:
    return InstanceRecord(
        instance=InstanceId(instance),
        generation=Generation(generation),
        role=role,
        model="tiny",
        layout=layout,
        max_model_len=max_model_len,
        rpc_address=f"rpc-{instance}",
        transfer_address=f"transfer-{instance}",
        events_address=f"events-{instance}",
        http_address=f"{instance}:80",
        host="here",
        load=load or Load(free_blocks=100, total_blocks=100, prefill_tokens_per_s=1000.0),
        pooling=pooling,
    )


@dataclass
class Job:
    """A request at a fake instance. `sent` counts the tokens that this instance has sent of each sequence."""

    message: Prefill | Decode | Generate
    sent: dict[int, int] = field(default_factory=dict)
    live: set[int] = field(default_factory=set)

    @property
    def work(self) -> Work:
        return self.message.work


class FakeInstance:
    """Answers as a real one would, one token of each sequence a step. `hold` stops it after so many steps."""

    def __init__(self, cluster: "FakeCluster", record: InstanceRecord) -> None:
        self.cluster = cluster
        self.record = record
        self.jobs: dict[RequestId, Job] = {}
        self.received: list[ToInstance] = []
        self.hold: int | None = None
        self.refuses: ErrorCode | None = None
        self.draining = False
        self.command_error: str | None = ""
        """Error with which operators' commands are refused, empty for none; None: they get no answer."""
        self.on_command: Callable[[EngineCommand], None] | None = None
        """Executes operators' commands in place of this class."""
        self.answer_with: list[float] | None = None
        """Scores of classes to answer with."""
        self.cached: list[BlockHash] = []
        self.link: FakeLink | None = None
        self.sequence = 0
        self.no_adapters: set[str] | None = set()
        self.failed_encoders: list[InstanceId] = []
        """Reported with each prompt."""
        self.on_batch: Callable[[EventBatch], None] | None = None
        self._is_due = False

    def assignments(self) -> list[Prefill | Decode | Generate]:
        return [m for m in self.received if isinstance(m, Prefill | Decode | Generate)]

    def cancels(self) -> list[Cancel]:
        return [m for m in self.received if isinstance(m, Cancel)]

    def send(self, message: ToRouter) -> None:
        if self.link is not None:
            self.link.on_message(message)

    def on_message(self, message: ToInstance) -> None:
        self.received.append(message)
        match message:
            case Heartbeat():
                self.report()
            case SnapshotRequest():
                self.send(
                    Snapshot(
                        instance=self.record.instance,
                        generation=self.record.generation,
                        sequence=self.sequence,
                        device=self.cached,
                    )
                )
            case Cancel(request_id=request_id, sequence=sequence):
                if (job := self.jobs.get(request_id)) is not None:
                    job.live -= job.live if sequence is None else {sequence}
                    if not job.live:
                        del self.jobs[request_id]
            case Prefill() | Decode() | Generate():
                self._accept(message)
            case Pool():
                self._pool(message)
            case LoadAdapter() | UnloadAdapter() | EngineCommand():
                self._operate(message)

    def report(self, load: Load | None = None) -> None:
        self.send(
            LoadReport(
                instance=self.record.instance,
                generation=self.record.generation,
                load=load or self.record.load,
                draining=self.draining,
                adapters=self.record.adapters,
                links=[
                    LinkStatus(
                        peer=InstanceId("prefill-0"),
                        transport="memory",
                        bytes_per_second=2e9,
                        choice="rule",
                        reason="memory: in use",
                    )
                ],
            )
        )

    def _operate(self, message: LoadAdapter | UnloadAdapter | EngineCommand) -> None:
        if not isinstance(message, EngineCommand):
            self._change_adapter(message)
        elif self.on_command is not None:
            self.on_command(message)
        elif self.command_error is not None:
            error, result = self.command_error or None, f"did {message.action}"
            self.send(EngineCommandDone(request_id=message.request_id, error=error, result=result))

    def _change_adapter(self, message: LoadAdapter | UnloadAdapter) -> None:
        """Refuses what is to come from a folder named in `no_adapters`, and does not answer when that is None."""
        kept = [one for one in self.record.adapters if one.name != message.name]
        if self.no_adapters is None:
            return
        if isinstance(message, LoadAdapter):
            if message.path in self.no_adapters:
                self.send(AdapterChanged(request_id=message.request_id, refusal="invalid", message="a rank too high"))
                return
            new = AdapterRecord(name=message.name, fingerprint=message.path, path=message.path, at_run_time=True)
            kept.append(new)
        self.record = msgspec.structs.replace(self.record, adapters=kept)
        self.report()
        self.send(AdapterChanged(request_id=message.request_id))

    def store(self, names: list[BlockHash]) -> None:
        self.cached += names
        self.sequence += 1
        assert self.on_batch is not None
        self.on_batch(EventBatch(self.record.instance, self.record.generation, self.sequence, [BlocksStored(names)]))

    def resume(self) -> None:
        self.hold = None
        self._soon()

    def die(self, reason: str = "the connection broke") -> None:
        """End the instance: it sends nothing any more."""
        link, self.link = self.link, None
        self.jobs.clear()
        self.cluster.instances.pop(self.record.instance, None)
        if link is not None:
            link.lose(reason)

    def _pool(self, message: Pool) -> None:
        """Answer each input, unless it is held, with three numbers that depend on this input alone."""
        if self.refuses is not None:
            failed = Failed(request_id=message.request_id, code=self.refuses, message="refused by the test")
            asyncio.get_running_loop().call_soon(self.send, failed)
            return
        done = message.inputs[: self.hold]
        answers: list[Answer] = [pooled(message, index, self.answer_with) for index in range(len(done))]
        asyncio.get_running_loop().call_soon(self.send, Batch(answers))

    def _accept(self, message: Prefill | Decode | Generate) -> None:
        if self.refuses is not None:
            failed = Failed(request_id=message.work.request_id, code=self.refuses, message="refused by the test")
            asyncio.get_running_loop().call_soon(self.send, failed)
            return
        job = Job(message, {i: 0 for i in message.work.sequences}, set(message.work.sequences))
        self.jobs[message.work.request_id] = job
        self._soon()

    def _soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        self._is_due = False
        if self.hold is not None:
            if self.hold <= 0:
                return
            self.hold -= 1
        answers: list[Answer] = []
        for job in list(self.jobs.values()):
            answers += self._advance(job)
        if answers:
            self.send(Batch(answers))
        if self.jobs:
            self._soon()

    def _advance(self, job: Job) -> list[Tokens | PrefillReport | HandoffReport | Failed]:
        work, message = job.work, job.message
        answers: list[Tokens | PrefillReport | HandoffReport | Failed] = []
        offset = len(work.token_ids) - work.num_prompt_tokens
        if isinstance(message, Decode):
            if not self.cluster.is_prefilled(message.ticket):
                return []
            offset += 1
            if not any(job.sent.values()):
                answers.append(handoff_report(work))
        elif not any(job.sent.values()):
            report = prefill_report(work)
            answers.append(msgspec.structs.replace(report, failed_encoders=self.failed_encoders))
        for sequence in sorted(job.live):
            position = offset + job.sent[sequence]
            if position < work.sampling.max_tokens:
                answers.append(self._token(job, sequence, position))
            else:
                job.live.discard(sequence)
        if isinstance(message, Prefill):
            job.live.clear()
            if message.ticket is not None:
                self.cluster.on_prefill_done.add(message.ticket.ticket)
        if not job.live:
            self.jobs.pop(work.request_id, None)
        return answers

    def _token(self, job: Job, sequence: int, position: int) -> Tokens:
        work = job.work
        token_id = self.cluster.token_of(work, sequence, position)
        job.sent[sequence] += 1
        is_eos = token_id == self.cluster.eos and not work.sampling.ignore_eos
        is_stop = is_eos or token_id in work.sampling.stop_token_ids
        is_last = position + 1 >= work.sampling.max_tokens
        if is_stop or is_last:
            job.live.discard(sequence)
        return Tokens(
            request_id=work.request_id,
            sequence=sequence,
            position=position,
            token_ids=[token_id],
            logprobs=[logprobs_of(token_id, work.sampling.logprobs)] if work.sampling.logprobs is not None else None,
            finish_reason="stop" if is_stop else "length" if is_last else None,
            stop_token_id=token_id if is_stop else None,
        )


def pooled(message: Pool, index: int, classes: list[float] | None) -> Pooled:
    given = message.inputs[index]
    values = [float(len(given.token_ids)), float(sum(given.token_ids)), float(sum(given.token_type_ids or []))]
    rows = 1
    if message.params.task == "classify":
        values = classes or [1 / (1 + len(given.token_ids))]
    elif message.params.task == "token_embed":
        rows = len(given.token_ids)
    data = struct.pack(f"<{len(values)}f", *values) * rows
    shape = [len(values)] if message.params.task != "token_embed" else [rows, len(values)]
    return Pooled(request_id=message.request_id, index=index, shape=shape, data=data)


def logprobs_of(token_id: int, wanted: int) -> TokenLogprobs:
    top = [TokenLogprob(token_id + i, -0.5 - i, i + 1) for i in range(wanted)]
    return TokenLogprobs(TokenLogprob(token_id, -0.5, 1), top)


def prefill_report(work: Work) -> PrefillReport:
    prompt_logprobs = None
    if (wanted := work.sampling.prompt_logprobs) is not None:
        prompt_logprobs = encode_logprobs([None, *(logprobs_of(token, wanted) for token in work.token_ids[1:])])
    return PrefillReport(
        request_id=work.request_id,
        queue_s=0.25,
        prefill_s=0.5,
        cached_tokens={"device": 4},
        prompt_logprobs=prompt_logprobs,
    )


def handoff_report(work: Work) -> HandoffReport:
    return HandoffReport(
        request_id=work.request_id,
        transport="memory",
        handoff_s=0.125,
        exposed_s=0.0625,
        transferred_blocks=3,
        reused_blocks=1,
        transferred_bytes=1000,
    )


class FakeLifecycle:
    """An owner of an attempt that only records its notifications, with their sender."""

    def __init__(self) -> None:
        self.heard: list[tuple[Attempt, Answer | str]] = []

    def on_placed(self, placement: Placement) -> None:
        raise AssertionError("the attempts of these tests are made without a placement")

    def on_tokens(self, attempt: Attempt, worker: WorkerState, tokens: Tokens, now: float) -> None:
        self.heard.append((attempt, tokens))

    def on_answer(self, attempt: Attempt, worker: WorkerState, answer: Answer) -> None:
        self.heard.append((attempt, answer))

    def on_lost(self, attempt: Attempt, worker: WorkerState, reason: str) -> None:
        self.heard.append((attempt, reason))

    def on_error(self, error: Exception) -> None:
        raise error


class FakeLink:
    def __init__(
        self, instance: FakeInstance | None, on_message: Callable[[ToRouter], None], on_lost: Callable[[str], None]
    ) -> None:
        self.instance = instance
        self.on_message = on_message
        self._on_lost = on_lost
        self._is_lost = False

    async def start(self) -> None:
        if self.instance is not None:
            self.instance.link = self
            self.instance.report()

    def prepare(self, message: ToInstance) -> Callable[[], None]:
        encode(message)  # raises as a real link does
        return partial(self._send, message)

    def _send(self, message: ToInstance) -> None:
        if self.instance is not None and self.instance.link is self and not self._is_lost:
            self.instance.on_message(message)

    async def close(self) -> None:
        self._is_lost = True

    def lose(self, reason: str) -> None:
        if not self._is_lost:
            self._is_lost = True
            asyncio.get_running_loop().call_soon(self._on_lost, reason)


class FakeSubscriber:
    def __init__(self, instance: FakeInstance | None, on_batch: Callable[[EventBatch], None]) -> None:
        self._instance = instance
        self._on_batch = on_batch

    async def start(self) -> None:
        if self._instance is not None:
            self._instance.on_batch = self._on_batch

    def rebase(self, sequence: int) -> None:
        pass

    async def close(self) -> None:
        pass


class FakeCluster:
    """Registry view, connector and instances in one."""

    def __init__(self, token_of: TokenOf = letters, eos: int = 2) -> None:
        self.token_of = token_of
        self.eos = eos
        self.instances: dict[InstanceId, FakeInstance] = {}
        self.registered: dict[InstanceId, InstanceRecord] = {}
        self.on_prefill_done: set[str] = set()
        self.registry_answers = True
        self.on_change: Callable[[], None] = lambda: None

    def __getitem__(self, instance: str) -> FakeInstance:
        return self.instances[InstanceId(instance)]

    def add(self, new: InstanceRecord) -> FakeInstance:
        instance = FakeInstance(self, new)
        self.instances[new.instance] = instance
        self.registered[new.instance] = new
        self.on_change()
        return instance

    def forget(self, instance: str) -> None:
        """Its record is gone from the registry."""
        del self.registered[InstanceId(instance)]
        self.on_change()

    def is_prefilled(self, ticket: Ticket) -> bool:
        return ticket.ticket in self.on_prefill_done

    async def start(self, on_change: Callable[[], None]) -> None:
        self.on_change = on_change

    def records(self) -> list[InstanceRecord]:
        return [self.registered[instance] for instance in sorted(self.registered)]

    def is_connected(self) -> bool:
        return self.registry_answers

    async def close(self) -> None:
        pass

    def link(
        self, record: InstanceRecord, on_message: Callable[[ToRouter], None], on_lost: Callable[[str], None]
    ) -> FakeLink:
        return FakeLink(self.instances.get(record.instance), on_message, on_lost)

    def subscriber(
        self, record: InstanceRecord, on_batch: Callable[[EventBatch], None], on_gap: Callable[[], None]
    ) -> FakeSubscriber:
        return FakeSubscriber(self.instances.get(record.instance), on_batch)

    def busy(self) -> list[RequestId]:
        return [request_id for instance in self.instances.values() for request_id in instance.jobs]

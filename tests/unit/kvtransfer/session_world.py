"""The world that `test_session_model` plays with: two sessions, what is on its way between them, and their memories."""

from dataclasses import dataclass, field

from hypothesis.stateful import RuleBasedStateMachine

from baton_serve.contracts.identity import BlockHash
from baton_serve.kvtransfer.control_messages import Again, Blocks, Done, Fail, Fetch, Piece, Ready, Release
from baton_serve.kvtransfer.session.consumer_session import ConsumerSession
from baton_serve.kvtransfer.session.producer_session import ProducerSession
from baton_serve.kvtransfer.session.states import ProducerState
from baton_serve.kvtransfer.session.steps import (
    Arrived,
    Ask,
    BlockPlacement,
    ConsumerStep,
    Copy,
    Drain,
    Give,
    ProducerStep,
    Released,
    Relink,
    Serve,
    SessionLimits,
    StopCopies,
    Succeed,
    Tell,
)
from tests.unit.kvtransfer.samples import TICKET, name

LIMITS = SessionLimits(connect_timeout_s=8, answer_timeout_s=9, lease_s=4, lease_grace_s=0.5)
NUM_BLOCKS = 4
GARBAGE = BlockHash(b"garbage!garbage!")


@dataclass
class Connection:
    """Two sets of messages in transit; messages may arrive in any order."""

    number: int
    to_producer: list[object] = field(default_factory=list)
    to_consumer: list[object] = field(default_factory=list)
    is_up: bool = True
    producer_knows: bool = False
    consumer_knows: bool = False


@dataclass(frozen=True)
class Renewal:
    sent_at: float
    attempt: int


@dataclass(frozen=True)
class Renewed:
    renewal: Renewal
    is_known: bool


class World(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.producer_ahead = 0.0
        self.consumer_ahead = 0.0
        self.pulls = False
        self.wanted: list[int] = []
        self.connections = [Connection(1)]
        self.link = self.connections[0]
        self.consumer: ConsumerSession | None = None
        self.consumer_alive = True
        self.producer: ProducerSession | None = None
        self.producer_alive = True
        self.parts = 1
        self.memory: dict[int, bytes] = {}
        self.cache: dict[int, bytes] = {}
        self.copies: list[BlockPlacement] = []
        self.wants_link = False
        self.stopped = False
        self.released: str | None = None
        self.outcome: Succeed | Give | None = None
        self.finished = False
        self.drain_asked = False
        self.mishaps = 0

    @property
    def producer_now(self) -> float:
        """Each end has a clock of its own: only how fast they run is the same."""
        return self.now + self.producer_ahead

    @property
    def consumer_now(self) -> float:
        return self.now + self.consumer_ahead

    def is_parked(self) -> bool:
        return self.producer is not None and self.producer.state is ProducerState.PARKED

    def is_open(self) -> bool:
        return self.producer_alive and self.producer is not None and not self.is_parked() and self.released is None

    def receive_at_producer(self, connection: Connection, message: object) -> None:
        match message:
            case Fetch():
                if self.producer is None:
                    self.producer = ProducerSession(now=self.producer_now, limits=LIMITS)
                steps = self.producer.fetch(
                    message, link=connection.number, pulls=self.pulls, now=self.producer_now, parts=self.parts
                )
                self.produce(steps)
            case Release() if self.producer is not None:
                self.produce(self.producer.release(message))
            case Again() if self.producer is not None:
                self.produce(self.producer.again(message, self.producer_now))
            case Renewal():
                is_known = self.producer is not None and self.producer.renew(self.producer_now)
                connection.to_consumer.append(Renewed(message, is_known))

    def receive_at_consumer(self, message: object) -> None:
        assert self.consumer is not None
        match message:
            case Ready() | Blocks() | Done() | Fail():
                self.consume(self.consumer.handle(message, self.consumer_now))
            case Renewed(renewal, is_known) if renewal.attempt == self.consumer.attempt:
                if is_known:
                    self.consumer.renewed(renewal.sent_at)
                else:
                    self.consume(self.consumer.forgotten(renewal.attempt, self.consumer_now))

    def produce(self, steps: list[ProducerStep]) -> None:
        assert self.producer is not None
        connection = next((c for c in self.connections if c.number == self.producer.link), None)
        for step in steps:
            match step:
                case Tell():
                    if connection is not None:
                        connection.to_consumer.append(step.message)
                case Serve():
                    if connection is not None:
                        for index, block in step.blocks:
                            assert self.released is None
                            assert all(self.memory[n] == self.content(n) for n in self.numbers(block, step.parts))
                            pieces = [Piece(index, block, None)]
                            connection.to_consumer.append(Blocks(TICKET.ticket, step.attempt, pieces, parts=step.parts))
                case Drain():
                    self.drain_asked = True
                case Released():
                    self.released = step.reason
                    self.memory = dict.fromkeys(self.memory, GARBAGE)

    def consume(self, steps: list[ConsumerStep]) -> None:
        assert self.consumer is not None
        for step in steps:
            match step:
                case Ask():
                    if self.link.is_up:
                        self.link.to_producer.append(step.message)
                case Copy():
                    self.copies += step.placements
                case Arrived():
                    assert all(self.is_here(block) for block in self.wanted if name(block) in step.names)
                case Relink():
                    self.wants_link = True
                case StopCopies():
                    self.stopped = True
                case Succeed() | Give():
                    assert self.outcome is None
                    assert not self.copies
                    self.outcome = step
                    self.check_outcome(step)

    def check_outcome(self, step: Succeed | Give) -> None:
        assert self.consumer is not None
        if isinstance(step, Succeed):
            assert step.payload == b"payload"
            assert {name(block) for block in self.wanted} == set(self.consumer.received)
        for block in self.wanted:
            if name(block) in self.consumer.received:
                assert self.is_here(block)

    def content(self, number: int) -> bytes:
        """Return the content of part `number`, counted over the parts of all blocks."""
        return name(number // self.parts) + bytes([number % self.parts])

    def compute(self, block: int, part: int) -> None:
        number = block * self.parts + part
        self.memory[number] = self.content(number)

    def numbers(self, place: int, parts: int) -> range:
        """Of the parts of block `place`, or of the one part that it is."""
        each = self.parts // parts
        return range(place * each, (place + 1) * each)

    def is_here(self, block: int) -> bool:
        numbers = range(block * self.parts, (block + 1) * self.parts)
        return all(self.cache[number] == self.content(number) for number in numbers)

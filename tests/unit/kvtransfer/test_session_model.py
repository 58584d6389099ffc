"""Both ends of a transfer against a hostile world: messages lost, repeated and reordered, connections that break,
processes that die, copies that take their time, clocks that jump. Blocks carry no checksum here: the protocol alone
must keep them right.
"""

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from contracts.identity import BlockName, Generation, InstanceId, TicketId
from contracts.messages import Ticket
from kvtransfer.frames import Again, Blocks, Done, Fail, Fetch, Piece, Ready, Release
from kvtransfer.session.consumer import ConsumerSession
from kvtransfer.session.producer import ProducerSession
from kvtransfer.session.steps import (
    Arrived,
    Ask,
    ConsumerStep,
    Copy,
    Drain,
    Fault,
    Give,
    Placement,
    ProducerStep,
    Released,
    Relink,
    Serve,
    SessionLimits,
    StopCopies,
    Succeed,
    Tell,
)
from kvtransfer.session.table import ProducerState

LIMITS = SessionLimits(connect_timeout_s=8, answer_timeout_s=9, lease_s=4, lease_grace_s=0.5)
TICKET = Ticket(
    ticket=TicketId("t"),
    source=InstanceId("p"),
    source_generation=Generation(1),
    source_address="",
    sink=InstanceId("c"),
    sink_generation=Generation(2),
    timeout_s=20,
)
NUM_BLOCKS = 4
GARBAGE = BlockName(b"garbage!garbage!")


def name(index: int) -> BlockName:
    return BlockName(bytes([index]) * 16)


@dataclass
class Connection:
    """Two bags of messages: whatever order they come in, they may come in another."""

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
        self.connections = [Connection(1)]
        self.link = self.connections[0]
        self.consumer: ConsumerSession | None = None
        self.consumer_alive = True
        self.producer: ProducerSession | None = None
        self.producer_alive = True
        self.memory = {block: name(block) for block in range(NUM_BLOCKS)}
        self.cache = dict.fromkeys(range(NUM_BLOCKS), GARBAGE)
        self.copies: list[Placement] = []
        self.wants_link = False
        self.stopped = False
        self.released: str | None = None
        self.outcome: Succeed | Give | None = None
        self.finished = False
        self.drain_asked = False
        self.mishaps = 0

    @initialize(
        pulls=st.booleans(),
        partial=st.booleans(),
        wanted=st.sets(st.integers(0, NUM_BLOCKS - 1)),
        mishaps=st.sampled_from([0, 1, 1, 2, 3]),
        stage=st.integers(0, 4),
    )
    def begin(self, pulls: bool, partial: bool, wanted: set[int], mishaps: int, stage: int) -> None:
        """`stage`: how far all goes well before chance takes over."""
        self.pulls = pulls
        self.mishaps = mishaps
        self.wanted = sorted(wanted)
        pairs = [(name(block), block) for block in self.wanted]
        self.consumer = ConsumerSession(TICKET, pairs, now=self.now, limits=LIMITS, partial=partial)
        self.wants_link = True
        if stage >= 1:
            self.open()
            self.connect()
        if stage >= 2:
            self.deliver_all()
        if stage >= 3:
            for block in self.wanted[:2]:
                self.publish(block)
            self.deliver_all()
        if stage >= 4:
            self.finish()
            self.deliver_all()

    # the producer's engine

    @precondition(lambda self: self.producer_alive and (self.producer is None or self.is_parked()))
    @rule()
    def open(self) -> None:
        if self.producer is None:
            self.producer = ProducerSession(now=self.now, limits=LIMITS, ticket=TICKET)
        else:
            self.produce(self.producer.open(TICKET, self.now))

    @precondition(lambda self: self.is_open() and not self.finished)
    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def publish(self, block: int) -> None:
        assert self.producer is not None
        self.produce(self.producer.publish([(name(block), block)]))

    @precondition(lambda self: self.is_open() and not self.finished)
    @rule()
    def finish(self) -> None:
        assert self.producer is not None
        for block in range(NUM_BLOCKS):
            self.produce(self.producer.publish([(name(block), block)]))
        self.finished = True
        self.produce(self.producer.finish(b"payload", self.now))

    @precondition(lambda self: self.is_open() and self.mishaps)
    @rule()
    def fail(self) -> None:
        assert self.producer is not None
        self.mishaps -= 1
        self.produce(self.producer.give_up("failed", "no"))

    @precondition(lambda self: self.drain_asked and self.producer_alive)
    @rule()
    def quiet(self) -> None:
        assert self.producer is not None
        self.drain_asked = False
        self.produce(self.producer.quiet())

    # the consumer's side

    @precondition(lambda self: self.wants_link and self.consumer_alive)
    @rule()
    def connect(self) -> None:
        assert self.consumer is not None
        self.wants_link = False
        if not self.producer_alive:
            self.consume(self.consumer.link_failed(Fault.LOST, "refused"))
            return
        if not self.link.is_up or self.link.consumer_knows:
            self.link = Connection(len(self.connections) + 1)
            self.connections.append(self.link)
        self.stopped = False
        self.consume(self.consumer.linked("usm", pulls=self.pulls, now=self.now))

    @precondition(lambda self: self.copies and self.consumer_alive)
    @rule(pick=st.integers(0, 100), damaged=st.sampled_from([False, False, False, True]))
    def copy(self, pick: int, damaged: bool) -> None:
        """With a transport that pulls, the memory is read now, whatever lies in it by now."""
        assert self.consumer is not None
        placement = self.copies.pop(pick % len(self.copies))
        if self.stopped:
            self.consume(self.consumer.abandoned([placement.index], self.now))
            return
        read = self.memory[placement.source] if self.pulls else name(placement.source)
        self.cache[placement.destination] = GARBAGE if damaged else read
        if damaged:
            self.consume(self.consumer.damaged([placement.index], self.now))
        else:
            self.consume(self.consumer.copied([placement.index], self.now))

    @precondition(lambda self: self.consumer_alive)
    @rule()
    def renew(self) -> None:
        assert self.consumer is not None
        if self.consumer.attempt and not self.consumer.is_over() and self.link.is_up:
            self.link.to_producer.append(Renewal(self.now, self.consumer.attempt))

    @precondition(lambda self: self.consumer_alive and self.outcome is None and self.mishaps)
    @rule()
    def cancel(self) -> None:
        assert self.consumer is not None
        self.mishaps -= 1
        self.consume(self.consumer.cancel())

    # the network

    @rule(which=st.integers(0, 9), pick=st.integers(0, 100), repeat=st.booleans())
    def deliver_to_producer(self, which: int, pick: int, repeat: bool) -> None:
        connection = self.connections[which % len(self.connections)]
        if connection.to_producer and connection.is_up:
            position = pick % len(connection.to_producer)
            message = connection.to_producer[position] if repeat else connection.to_producer.pop(position)
            if self.producer_alive:
                self.receive_at_producer(connection, message)

    @rule(which=st.integers(0, 9), pick=st.integers(0, 100), repeat=st.booleans())
    def deliver_to_consumer(self, which: int, pick: int, repeat: bool) -> None:
        connection = self.connections[which % len(self.connections)]
        if connection.to_consumer and connection.is_up:
            position = pick % len(connection.to_consumer)
            message = connection.to_consumer[position] if repeat else connection.to_consumer.pop(position)
            if self.consumer_alive and connection is self.link:
                self.receive_at_consumer(message)

    @rule()
    def deliver_all(self) -> None:
        """The usual case: everything arrives, in order."""
        for bag, deliver in (
            (self.link.to_producer, self.deliver_to_producer),
            (self.link.to_consumer, self.deliver_to_consumer),
        ):
            while bag and self.link.is_up:
                deliver(self.link.number - 1, 0, False)

    @precondition(lambda self: self.mishaps)
    @rule(which=st.integers(0, 9), pick=st.integers(0, 100), to_producer=st.booleans())
    def lose_message(self, which: int, pick: int, to_producer: bool) -> None:
        self.mishaps -= 1
        connection = self.connections[which % len(self.connections)]
        bag = connection.to_producer if to_producer else connection.to_consumer
        if bag:
            bag.pop(pick % len(bag))

    @precondition(lambda self: self.mishaps)
    @rule()
    def break_connection(self) -> None:
        self.mishaps -= 1
        self.link.is_up = False

    @rule(which=st.integers(0, 9))
    def notice_break(self, which: int) -> None:
        connection = self.connections[which % len(self.connections)]
        if connection.is_up:
            return
        if not connection.producer_knows and self.producer_alive and self.producer is not None:
            connection.producer_knows = True
            if self.producer.link == connection.number:
                self.produce(self.producer.link_lost(dead=not self.consumer_alive))
        elif not connection.consumer_knows and self.consumer_alive and connection is self.link:
            connection.consumer_knows = True
            assert self.consumer is not None
            self.consume(self.consumer.link_lost("broken", dead=not self.producer_alive, now=self.now))

    # fate

    @precondition(lambda self: self.mishaps)
    @rule()
    def kill_producer(self) -> None:
        self.mishaps -= 1
        self.producer_alive = False
        self.link.is_up = False

    @precondition(lambda self: self.mishaps)
    @rule()
    def kill_consumer(self) -> None:
        self.mishaps -= 1
        self.consumer_alive = False
        self.link.is_up = False
        self.copies.clear()

    @rule(step=st.sampled_from([0.01, 0.01, 0.1, 0.3]))
    def pass_time(self, step: float) -> None:
        self.now += step

    @precondition(lambda self: self.mishaps)
    @rule(step=st.sampled_from([1.1, 4.2, 4.6, 4.6, 25.0]))
    def freeze_consumer(self, step: float) -> None:
        """Its copies stand still while the producer goes on."""
        self.mishaps -= 1
        self.now += step
        self.tick_producer()
        if self.drain_asked and self.producer_alive:
            self.quiet()

    @rule()
    def tick_producer(self) -> None:
        if self.producer is not None and self.producer_alive:
            self.produce(self.producer.tick(self.now))

    @rule()
    def tick_consumer(self) -> None:
        if self.consumer is not None and self.consumer_alive:
            self.consume(self.consumer.tick(self.now))

    @invariant()
    def sessions_are_sound(self) -> None:
        if self.consumer is not None:
            self.consumer.check_invariants()
        if self.producer is not None:
            self.producer.check_invariants()

    def teardown(self) -> None:
        """However it went, both ends that live come to an end by ticks alone, and soon."""
        if self.consumer is None:
            return
        self.link.is_up = False
        for _ in range(200):
            self.now += 0.5
            self.tick_producer()
            self.tick_consumer()
            while self.copies:
                self.copy(0, False)
            if self.wants_link and self.consumer_alive:
                self.connect()
            if self.drain_asked and self.producer_alive:
                self.quiet()
        if self.consumer_alive:
            assert self.consumer.is_over()
            assert self.outcome is not None
        if self.producer_alive and self.producer is not None:
            assert self.producer.is_over()
        self.sessions_are_sound()

    # helpers

    def is_parked(self) -> bool:
        return self.producer is not None and self.producer.state is ProducerState.PARKED

    def is_open(self) -> bool:
        return self.producer_alive and self.producer is not None and not self.is_parked() and self.released is None

    def receive_at_producer(self, connection: Connection, message: object) -> None:
        match message:
            case Fetch():
                if self.producer is None:
                    self.producer = ProducerSession(now=self.now, limits=LIMITS)
                steps = self.producer.fetch(message, link=connection.number, pulls=self.pulls, now=self.now)
                self.produce(steps)
            case Release() if self.producer is not None:
                self.produce(self.producer.release(message))
            case Again() if self.producer is not None:
                self.produce(self.producer.again(message, self.now))
            case Renewal():
                is_known = self.producer is not None and self.producer.renew(self.now)
                connection.to_consumer.append(Renewed(message, is_known))

    def receive_at_consumer(self, message: object) -> None:
        assert self.consumer is not None
        match message:
            case Ready() | Blocks() | Done() | Fail():
                self.consume(self.consumer.handle(message, self.now))
            case Renewed(renewal, is_known) if renewal.attempt == self.consumer.attempt:
                if is_known:
                    self.consumer.renewed(renewal.sent_at)
                else:
                    self.consume(self.consumer.forgotten(renewal.attempt, self.now))

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
                            connection.to_consumer.append(
                                Blocks(TICKET.ticket, step.attempt, [Piece(index, block, None)])
                            )
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
                    assert all(self.cache[block] == name(block) for block in self.wanted if name(block) in step.names)
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
                assert self.cache[block] == name(block)


World.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestBothEnds = World.TestCase

"""Both ends of a transfer against a hostile world: messages lost, repeated and reordered, connections that break,
processes that die, copies that take their time, clocks that differ and jump. Blocks carry no checksum here: the
protocol alone must keep them right. They may travel in parts, which hold garbage until they are published.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from baton_serve.kvtransfer.session.consumer_session import ConsumerSession
from baton_serve.kvtransfer.session.producer_session import ProducerSession
from baton_serve.kvtransfer.session.steps import Fault
from tests.unit.kvtransfer.samples import TICKET, name
from tests.unit.kvtransfer.session_world import GARBAGE, LIMITS, NUM_BLOCKS, Connection, Renewal, World

TICK_S = 0.4
"""Interval of the ticks of an end that keeps running."""


class BothEnds(World):
    @initialize(
        pulls=st.booleans(),
        partial=st.booleans(),
        wanted=st.sets(st.integers(0, NUM_BLOCKS - 1)),
        mishaps=st.sampled_from([0, 1, 1, 2, 3]),
        stage=st.integers(0, 6),
        clocks=st.sampled_from([(0.0, 0.0), (5e5, 0.0), (0.0, 5e5)]),
        parts=st.sampled_from([1, 2, 3]),
    )
    def begin(
        self,
        pulls: bool,
        partial: bool,
        wanted: set[int],
        mishaps: int,
        stage: int,
        clocks: tuple[float, float],
        parts: int,
    ) -> None:
        """`stage`: how far all goes well before chance takes over; 5: until a tail is cut off."""
        self.pulls, self.parts = pulls, parts
        self.memory = dict.fromkeys(range(NUM_BLOCKS * parts), GARBAGE)
        self.cache = dict(self.memory)
        self.producer_ahead, self.consumer_ahead = clocks
        self.mishaps = mishaps
        self.wanted = sorted(wanted)
        pairs = [(name(block), block) for block in self.wanted]
        self.consumer = ConsumerSession(TICKET, pairs, now=self.consumer_now, limits=LIMITS, partial=partial)
        self.wants_link = True
        if stage >= 1:
            self.open()
            self.connect()
        if stage >= 2:
            self.deliver_all()
        if stage >= 3:
            for block in self.wanted[: 2 if stage == 3 else 1]:
                self.publish(block)
            self.deliver_all()
        if stage >= 4 and self.parts > 1 and self.wanted:
            self.publish_part(set(self.wanted), 0)
            self.deliver_all()
            while self.copies:
                self.copy(0, False)
        if stage == 5 and self.mishaps:
            self.break_connection(True)
        if stage >= 6:
            self.finish()
            self.deliver_all()

    # the producer's engine

    @precondition(lambda self: self.producer_alive and (self.producer is None or self.is_parked()))
    @rule()
    def open(self) -> None:
        if self.producer is None:
            self.producer = ProducerSession(now=self.producer_now, limits=LIMITS, ticket=TICKET)
        else:
            self.produce(self.producer.open(TICKET, self.producer_now))

    @precondition(lambda self: self.is_open() and not self.finished)
    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def publish(self, block: int) -> None:
        assert self.producer is not None
        for part in range(self.parts):
            self.compute(block, part)
        self.produce(self.producer.publish([(name(block), block)]))

    @precondition(lambda self: self.is_open() and not self.finished and self.parts > 1)
    @rule(blocks=st.sets(st.integers(0, NUM_BLOCKS - 1), min_size=1), part=st.integers(0, 2))
    def publish_part(self, blocks: set[int], part: int) -> None:
        assert self.producer is not None
        part %= self.parts
        for block in blocks:
            self.compute(block, part)
        self.produce(
            self.producer.publish_parts([(name(block), block) for block in sorted(blocks)], range(part, part + 1))
        )

    @precondition(lambda self: self.is_open() and not self.finished)
    @rule()
    def finish(self) -> None:
        assert self.producer is not None
        for block in range(NUM_BLOCKS):
            self.publish(block)
        self.finished = True
        self.produce(self.producer.finish(b"payload", self.producer_now))

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
        self.consume(self.consumer.linked("usm", pulls=self.pulls, now=self.consumer_now, parts=self.parts))

    @precondition(lambda self: self.copies and self.consumer_alive)
    @rule(pick=st.integers(0, 100), damaged=st.sampled_from([False, False, False, True]), has_begun=st.booleans())
    def copy(self, pick: int, damaged: bool, has_begun: bool = False) -> None:
        """A transport that pulls reads the memory now, with its present content."""
        assert self.consumer is not None
        placement = self.copies.pop(pick % len(self.copies))
        if self.stopped and not has_begun:
            self.consume(self.consumer.abandoned([placement.index], self.consumer_now))
            return
        read, written = (self.numbers(place, placement.parts) for place in (placement.source, placement.destination))
        for source, destination in zip(read, written, strict=True):
            found = self.memory[source] if self.pulls else self.content(source)
            self.cache[destination] = GARBAGE if damaged else found
        if damaged:
            self.consume(self.consumer.damaged([placement.index], self.consumer_now))
        else:
            self.consume(self.consumer.copied([placement.index], self.consumer_now))

    @precondition(lambda self: self.consumer_alive)
    @rule()
    def renew(self) -> None:
        assert self.consumer is not None
        if self.consumer.attempt and not self.consumer.is_over() and self.link.is_up:
            self.link.to_producer.append(Renewal(self.consumer_now, self.consumer.attempt))

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
    @rule(is_noticed=st.booleans())
    def break_connection(self, is_noticed: bool) -> None:
        """`is_noticed`: at once, by both ends."""
        self.mishaps -= 1
        self.link.is_up = False
        if is_noticed:
            self.notice_break(self.link.number - 1)
            self.notice_break(self.link.number - 1)

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
            self.consume(self.consumer.link_lost("broken", dead=not self.producer_alive, now=self.consumer_now))

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
    @rule(step=st.sampled_from([1.2, 4.4, 4.8, 4.8, 24.8]))
    def freeze_consumer(self, step: float) -> None:
        """The copies of the consumer pause while the producer continues."""
        self.mishaps -= 1
        for _ in range(round(step / TICK_S)):
            self.now += TICK_S
            self.tick_producer()
        if self.drain_asked and self.producer_alive:
            self.quiet()

    @precondition(lambda self: self.mishaps)
    @rule(step=st.sampled_from([1.1, 4.6, 25.0]), who=st.sampled_from(["both", "consumer", "producer", "producer"]))
    def jump(self, step: float, who: str) -> None:
        """A host that slept, a process that stood still, or a clock that was set."""
        self.mishaps -= 1
        if who in ("both", "producer"):
            self.producer_ahead += step
        if who in ("both", "consumer"):
            self.consumer_ahead += step
        self.tick_producer()
        if self.drain_asked and self.producer_alive:
            self.quiet()

    @rule()
    def tick_producer(self) -> None:
        if self.producer is not None and self.producer_alive:
            self.produce(self.producer.tick(self.producer_now))

    @rule()
    def tick_consumer(self) -> None:
        if self.consumer is not None and self.consumer_alive:
            self.consume(self.consumer.tick(self.consumer_now))

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


BothEnds.TestCase.settings = settings(
    max_examples=15, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestBothEnds = BothEnds.TestCase

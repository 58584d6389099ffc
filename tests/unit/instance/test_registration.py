import asyncio

from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.contracts.instance import InstanceRecord, Load
from baton_serve.services.common.errors import RegistryUnavailable, Superseded
from baton_serve.services.instance.registration import RETRY_S, Registration
from tests.unit.instance.fakes import FakeEngine, run, settle


class FakeRegistry:
    def __init__(self, *outcomes: Exception | None) -> None:
        self.outcomes = list(outcomes)
        self.registered: list[int] = []
        self.left = 0
        self.is_closed = False

    async def register(self, record: InstanceRecord, ttl_s: float) -> None:
        self.registered.append(record.load.free_blocks)
        if self.outcomes and (error := self.outcomes.pop(0)) is not None:
            raise error

    async def leave(self, instance: InstanceId, generation: Generation) -> None:
        self.left += 1

    async def close(self) -> None:
        self.is_closed = True


class Clock:
    """Sleeps end at once, but the third never."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        self.is_third = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if len(self.slept) == 3:
            self.is_third.set()
            await asyncio.get_running_loop().create_future()


def member(registry: FakeRegistry, clock: Clock, superseded: list[str]) -> Registration:
    free_blocks = iter(range(100))

    def record() -> InstanceRecord:
        return InstanceRecord(
            instance=InstanceId("decode-0"),
            generation=Generation(7),
            role="decode",
            model="m",
            layout=FakeEngine.layout,
            max_model_len=128,
            rpc_address="",
            transfer_address="",
            events_address="",
            http_address="",
            host="h",
            load=Load(free_blocks=next(free_blocks), total_blocks=100),
        )

    return Registration(
        registry, record=record, ttl_s=9.0, on_superseded=lambda: superseded.append("stop"), sleep=clock.sleep
    )


def test_the_record_is_renewed_with_fresh_load_and_removed_at_the_end() -> None:
    async def test() -> None:
        registry, clock = FakeRegistry(), Clock()
        membership = member(registry, clock, [])
        membership.start()
        await clock.is_third.wait()
        await membership.leave()
        assert registry.registered == [0, 1, 2]
        assert clock.slept == [3.0, 3.0, 3.0]
        assert registry.left == 1 and registry.is_closed

    run(test())


def test_while_the_registry_is_away_it_tries_again_sooner() -> None:
    async def test() -> None:
        registry, clock = FakeRegistry(None, RegistryUnavailable("away"), None), Clock()
        membership = member(registry, clock, [])
        membership.start()
        await clock.is_third.wait()
        await membership.leave()
        assert clock.slept == [3.0, RETRY_S, 3.0]

    run(test())


def test_an_instance_is_notified_when_its_name_was_taken_over() -> None:
    async def test() -> None:
        superseded: list[str] = []
        registry, clock = FakeRegistry(Superseded("newer")), Clock()
        membership = member(registry, clock, superseded)
        membership.start()
        await settle()
        await membership.announce()
        assert superseded == ["stop"]
        await membership.leave()
        assert registry.registered == [0]

    run(test())


def test_records_are_sent_one_after_another() -> None:
    class SlowRegistry(FakeRegistry):
        """Answers when the test says so."""

        def __init__(self) -> None:
            super().__init__()
            self.answer = asyncio.Event()

        async def register(self, record: InstanceRecord, ttl_s: float) -> None:
            await super().register(record, ttl_s)
            await self.answer.wait()

    async def scenario() -> None:
        registry = SlowRegistry()
        m = member(registry, Clock(), [])
        first, second = asyncio.create_task(m.announce()), asyncio.create_task(m.announce())
        await settle()
        assert registry.registered == [0]
        registry.answer.set()
        await asyncio.gather(first, second)
        assert registry.registered == [0, 1]

    run(scenario())

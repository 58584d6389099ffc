import asyncio

from baton_serve.services.instance.drain.drain_state import DrainController
from tests.unit.instance.fakes import run, settle


class FakeServing:
    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.is_draining = False
        self.num_requests = 2
        self.idle = asyncio.Event()

    def refuse_new(self) -> None:
        self.log.append("refuse")
        self.is_draining = True

    async def drain(self, timeout_s: float) -> None:
        self.log.append(f"drain {timeout_s:g}")
        await self.idle.wait()
        self.num_requests = 0


def draining(log: list[str]) -> tuple[DrainController, FakeServing]:
    serving = FakeServing(log)

    async def announce() -> None:
        log.append("announce")

    async def migrate_out() -> None:
        log.append("hand on")

    made = DrainController(serving, announce=announce, request_stop=log.append, timeout_s=7.0, migrate_out=migrate_out)
    return made, serving


def test_new_work_is_refused_before_the_registry_is_notified() -> None:
    async def scenario() -> None:
        log: list[str] = []
        d, serving = draining(log)
        assert d.state == "ok"
        await d.begin()
        await d.begin()
        assert log == ["refuse", "announce"]
        assert serving.is_draining

    run(scenario())


def test_a_drain_with_exit_ends_the_process_and_one_without_waits_here() -> None:
    async def scenario() -> None:
        log: list[str] = []
        d, serving = draining(log)
        await d.ask(exit_afterwards=False)
        await d.ask(exit_afterwards=False)
        await settle()
        assert log == ["refuse", "announce", "drain 7"]
        serving.idle.set()
        await settle()
        assert d.state == "drained"
        await d.ask(exit_afterwards=True)
        assert log[-1] == "drained on request"

    run(scenario())


def test_hot_blocks_are_handed_on_once_when_all_requests_have_ended() -> None:
    async def scenario() -> None:
        log: list[str] = []
        d, serving = draining(log)
        first = asyncio.create_task(d.finish())
        await settle()
        assert "hand on" not in log
        serving.idle.set()
        await first
        await d.finish()
        assert log.count("hand on") == 1

    run(scenario())

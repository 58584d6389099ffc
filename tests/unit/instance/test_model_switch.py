"""Which commands change the model of an instance, in which state, and what failures leave behind."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from baton_serve.contracts.identity import RequestId
from baton_serve.contracts.messages import EngineCommand, ModelAction, WeightsSource
from baton_serve.engine.errors import ModelError
from baton_serve.services.instance.sleep_and_reload import PAUSE_REASON, ModelConflict, ModelSwitch
from tests.unit.instance.fakes import run

OLD = WeightsSource(model="/old", load_format="auto")
NEW = WeightsSource(model="/new", load_format="safetensors", version="v1")


class FakeHost:
    """Remembers in `log` what was asked of it. Weights in `unloadable` cannot be loaded."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.num_requests = 0
        self.is_draining = False
        self.unloadable: set[str] = set()
        self.misfits: set[str] = set()
        self.resumed = asyncio.Event()

    def pause(self, reason: str) -> None:
        self.log.append("pause")

    def resume(self) -> None:
        self.log.append("resume")
        self.resumed.set()

    async def idle(self, timeout_s: float) -> bool:
        self.log.append(f"idle {timeout_s:g}")
        return not self.num_requests

    async def check(self, loaded: WeightsSource, weights: WeightsSource) -> None:
        if weights.model in self.misfits:
            raise ModelError(f"{weights.model} has another architecture than {loaded.model}")

    async def unload(self, reason: str) -> None:
        self.log.append("unload")

    async def load(self, weights: WeightsSource) -> None:
        self.log.append(f"load {weights.model}")
        if weights.model in self.unloadable:
            raise ModelError(f"{weights.model} is broken")

    async def publish(self, *, is_sleeping: bool, pause_reason: str) -> None:
        assert pause_reason in ("", PAUSE_REASON)
        self.log.append("asleep" if is_sleeping else "awake, paused" if pause_reason else "awake")

    def give_up(self, reason: str) -> None:
        self.log.append(f"give up: {reason}")


class Switch:
    """A switch with its host. `do` executes one command, as `EngineCommands` does."""

    def __init__(self, *, pause_lease_s: float = 60.0) -> None:
        self.host = FakeHost()
        self.switch = ModelSwitch(self.host, OLD, pause_lease_s=pause_lease_s, publish_delay_s=0.0)

    async def do(self, action: ModelAction, weights: WeightsSource | None = None, timeout_s: float = 0.0) -> str:
        command = EngineCommand(request_id=RequestId("r"), action=action, weights=weights, timeout_s=timeout_s)
        try:
            return await self.switch.run(command)
        finally:
            await self.switch.publish()

    def taken(self) -> list[str]:
        """Return and forget the log of the host."""
        taken = list(self.host.log)
        self.host.log.clear()
        return taken


def scenario(test: Callable[[Switch], Coroutine[Any, Any, None]]) -> None:
    async def live() -> None:
        one = Switch()
        await test(one)
        one.switch.close()

    run(live())


def test_a_paused_model_is_freed_and_loaded_again() -> None:
    async def test(one: Switch) -> None:
        await one.do("pause", timeout_s=7.0)
        assert one.taken() == ["pause", "idle 7"]
        assert await one.do("sleep") == "sleeping"
        assert one.taken() == ["unload", "asleep"]
        assert await one.do("wake_up") == "awake"
        assert one.taken() == ["load /old", "awake"] and one.switch.state == "serving"

    scenario(test)


def test_running_requests_keep_the_model_and_new_ones_are_accepted_again() -> None:
    async def test(one: Switch) -> None:
        one.host.num_requests = 2
        with pytest.raises(ModelConflict, match=r"2 requests still run after 1\.5 s"):
            await one.do("pause", timeout_s=1.5)
        assert one.taken() == ["pause", "idle 1.5", "resume"] and one.switch.state == "serving"

    scenario(test)


def test_a_cancelled_pause_ends() -> None:
    async def test(one: Switch) -> None:
        async def never(timeout_s: float) -> bool:
            await asyncio.get_running_loop().create_future()
            return False

        one.host.idle = never  # type: ignore[method-assign]
        task = asyncio.create_task(one.do("pause"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert one.taken() == ["pause", "resume"] and one.switch.state == "serving"

    scenario(test)


def test_every_command_needs_its_state() -> None:
    async def test(one: Switch) -> None:
        for action in ("sleep", "wake_up", "update_weights", "restore_weights"):
            with pytest.raises(ModelConflict):
                await one.do(action, NEW)
        assert await one.do("resume") == "resumed"
        one.host.is_draining = True
        with pytest.raises(ModelConflict, match="drains"):
            await one.do("pause")
        one.host.is_draining = False
        await one.do("pause")
        await one.do("sleep")
        for action in ("pause", "sleep", "update_weights"):
            with pytest.raises(ModelConflict, match="sleeping"):
                await one.do(action, NEW)  # type: ignore[arg-type]
        assert await one.do("resume") == "not paused: sleeping"
        with pytest.raises(ModelConflict, match="no weights"):
            await one.do("check_weights")

    scenario(test)


def test_a_pause_without_a_command_ends_by_itself() -> None:
    async def live() -> None:
        one = Switch(pause_lease_s=0.01)
        await one.do("pause")
        await asyncio.wait_for(one.host.resumed.wait(), 10)
        assert one.switch.state == "serving"
        with pytest.raises(ModelConflict):
            await one.do("sleep")

    run(live())


def test_a_model_that_cannot_be_loaded_stays_asleep_and_may_be_woken_up_again() -> None:
    async def test(one: Switch) -> None:
        await one.do("pause")
        await one.do("sleep")
        one.host.unloadable = {"/old"}
        one.taken()
        with pytest.raises(ModelError):
            await one.do("wake_up")
        # Nothing has changed, so nothing is shown.
        assert one.taken() == ["load /old"] and one.switch.state == "sleeping"
        one.host.unloadable.clear()
        assert await one.do("wake_up") == "awake"

    scenario(test)


def test_new_weights_are_loaded_and_stay_paused_until_all_instances_have_them() -> None:
    async def test(one: Switch) -> None:
        await one.do("check_weights", NEW)
        await one.do("pause")
        one.taken()
        assert await one.do("update_weights", NEW) == "loaded /new"
        assert one.taken() == ["unload", "load /new", "awake, paused"]
        await one.do("resume")
        # From now on these are the weights that a wake-up loads.
        await one.do("pause")
        await one.do("sleep")
        one.taken()
        await one.do("wake_up")
        assert one.taken() == ["load /new", "awake"]

    scenario(test)


def test_weights_that_do_not_fit_unload_nothing() -> None:
    async def test(one: Switch) -> None:
        one.host.misfits = {"/new"}
        with pytest.raises(ModelError, match="architecture"):
            await one.do("check_weights", NEW)
        await one.do("pause")
        one.taken()
        with pytest.raises(ModelError, match="architecture"):
            await one.do("update_weights", NEW)
        assert one.taken() == [] and one.switch.state == "paused"

    scenario(test)


def test_after_a_failed_load_the_old_weights_are_loaded_again() -> None:
    async def test(one: Switch) -> None:
        one.host.unloadable = {"/new"}
        await one.do("pause")
        one.taken()
        with pytest.raises(ModelError, match="/new is broken"):
            await one.do("update_weights", NEW)
        assert one.taken() == ["unload", "load /new", "load /old", "awake, paused"]
        with pytest.raises(ModelConflict, match="no weights were updated"):
            await one.do("restore_weights")

    scenario(test)


def test_an_update_is_undone_if_another_instance_has_failed() -> None:
    async def test(one: Switch) -> None:
        await one.do("pause")
        await one.do("update_weights", NEW)
        one.taken()
        assert await one.do("restore_weights") == "loaded /old"
        assert one.taken() == ["unload", "load /old", "awake, paused"]
        await one.do("resume")
        assert one.switch.state == "serving"

    scenario(test)


def test_a_process_that_can_load_no_weights_any_more_ends() -> None:
    async def test(one: Switch) -> None:
        one.host.unloadable = {"/new", "/old"}
        await one.do("pause")
        with pytest.raises(ModelError):
            await one.do("update_weights", NEW)
        assert "give up: the weights in /old cannot be loaded again: /old is broken" in one.taken()

    scenario(test)

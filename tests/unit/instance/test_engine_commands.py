"""Commands of operators are executed by an instance's engine and answered."""

import asyncio
from pathlib import Path
from typing import Any, cast

import torch

from baton_serve.contracts.identity import RequestId
from baton_serve.contracts.messages import EngineAction, EngineCommand, EngineCommandDone, ModelAction
from baton_serve.engine.errors import ConfigError
from baton_serve.engine.step.profiling import TorchProfiler
from baton_serve.services.instance.engine_commands import EngineCommands
from baton_serve.services.instance.engine_thread import EngineThread
from baton_serve.services.instance.sleep_and_reload import ModelConflict
from tests.unit.instance.fakes import ROUTER, FakeEngine, FakeRouterPort, run, settle


class CachingEngine(FakeEngine):
    """It has a prefix cache and the real profiler."""

    def __init__(self) -> None:
        super().__init__()
        self.is_used = True
        self._profiler = TorchProfiler()

    def reset_prefix_cache(self) -> bool:
        return not self.is_used

    def start_profile(self, folder: Path) -> None:
        self._profiler.start(folder, torch.device("cpu"))

    def stop_profile(self) -> Path:
        return self._profiler.stop()


def test_commands_are_executed_in_the_engines_thread_and_answered(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine, router = CachingEngine(), FakeRouterPort()
        thread = EngineThread(lambda: engine)
        await thread.start()
        thread.attach(on_step_result=ignore, on_stats=ignore, on_broken=ignore)
        try:
            present, switch = lambda: cast(Any, thread), cast(Any, FakeSwitch(router))
            commands = EngineCommands(present, switch, router=router, profile_folder=str(tmp_path / "traces"))
            assert (await ask(commands, router, "reset_prefix_cache")).result.startswith("blocks that requests use")
            engine.is_used = False
            assert (await ask(commands, router, "reset_prefix_cache")).result == "no block is cached"
            assert "not running" in str((await ask(commands, router, "stop_profile")).error)
            assert (await ask(commands, router, "start_profile")).error is None
            assert "is running" in str((await ask(commands, router, "start_profile")).error)
            written = Path((await ask(commands, router, "stop_profile")).result)
            assert [written] == list((tmp_path / "traces").iterdir())
            without = EngineCommands(present, switch, router=router, profile_folder="")
            assert "VLLM_TORCH_PROFILER_DIR" in str((await ask(without, router, "start_profile")).error)
            asleep = EngineCommands(no_engine, switch, router=router, profile_folder="")
            assert "the model is not loaded" in str((await ask(asleep, router, "reset_prefix_cache")).error)
            await commands.close()
        finally:
            await thread.stop()

    run(scenario(), limit_s=60)  # torch's profiler takes seconds to start on a busy machine


def no_engine() -> Any:
    raise ConfigError("the model is not loaded")


class FakeSwitch:
    """Refuses to sleep, and remembers in `log` what it was asked for."""

    def __init__(self, router: FakeRouterPort) -> None:
        self.log: list[str] = []
        self.router = router

    async def run(self, command: EngineCommand) -> str:
        self.log.append(command.action)
        if command.action == "sleep":
            raise ModelConflict("2 requests still run")
        return "awake"

    async def publish(self) -> None:
        self.log.append(f"publish after {len(self.router.sent)} answers")

    def close(self) -> None:
        self.log.append("close")


def test_a_changed_model_is_shown_after_the_answer_and_a_conflict_is_marked() -> None:
    async def scenario() -> None:
        router = FakeRouterPort()
        switch = FakeSwitch(router)
        commands = EngineCommands(no_engine, cast(Any, switch), router=router, profile_folder="")
        awake = await ask(commands, router, "wake_up")
        await settle()
        assert (awake.result, awake.error) == ("awake", None)
        assert switch.log == ["wake_up", "publish after 1 answers"]
        refused = await ask(commands, router, "sleep")
        assert refused.is_conflict and refused.error == "2 requests still run"
        await commands.close()
        assert switch.log[-1] == "close"

    run(scenario())


async def ask(
    commands: EngineCommands, router: FakeRouterPort, action: EngineAction | ModelAction
) -> EngineCommandDone:
    router.has_sent.clear()
    commands.on_message(ROUTER, EngineCommand(request_id=RequestId("r"), action=action))
    await asyncio.wait_for(router.has_sent.wait(), 50)
    _, answer = router.sent[-1]
    assert isinstance(answer, EngineCommandDone) and answer.request_id == "r"
    return answer


def ignore(_: object) -> None:
    """Takes what the thread reports."""

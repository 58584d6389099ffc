"""Executes the commands of operators that routers pass on: forget the prefix cache, start or stop a profile."""

import asyncio
import logging
from pathlib import Path

from baton_serve.contracts.messages import EngineCommand, EngineCommandDone
from baton_serve.engine import Engine, EngineError
from baton_serve.engine.errors import ConfigError
from baton_serve.services.common.rpc.links import RouterId
from baton_serve.services.instance.engine_thread import EngineThread
from baton_serve.services.instance.errors import EngineBroken
from baton_serve.services.instance.ports import RouterPort

logger = logging.getLogger(__name__)


class EngineCommands:
    """Executes `EngineCommand` messages between two steps of the engine, from start to shutdown. Event loop only."""

    def __init__(self, engine: EngineThread[Engine] | None, *, router: RouterPort, profile_folder: str) -> None:
        """Without `engine` every command is refused, because the model computes vectors.

        `profile_folder` gets the traces of profiles; it is empty if profiles are off.
        """
        self._engine = engine
        self._router = router
        self._profile_folder = profile_folder
        self._tasks: set[asyncio.Task[None]] = set()

    def on_message(self, router: RouterId, command: EngineCommand) -> None:
        """Execute a command in a task, and answer `router` when it is done or has failed."""
        task = asyncio.get_running_loop().create_task(self._answer(router, command), name="engine command")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop waiting for running commands. Their routers get no answer."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _answer(self, router: RouterId, command: EngineCommand) -> None:
        error, result = None, ""
        try:
            result = await self._execute(command)
            logger.info("%s on request of a router: %s", command.action, result)
        except (EngineError, EngineBroken, OSError) as exc:
            error = str(exc)
            logger.warning("cannot execute %s: %s", command.action, exc)
        self._router.send(router, EngineCommandDone(request_id=command.request_id, error=error, result=result))

    async def _execute(self, command: EngineCommand) -> str:
        """Execute a command and return a text about its result. Raises `EngineError`, `EngineBroken` or `OSError`."""
        if self._engine is None:
            raise ConfigError("this model computes vectors: its engine has no prefix cache and records no profiles")
        match command.action:
            case "reset_prefix_cache":
                is_empty = await self._engine.call(lambda engine: engine.reset_prefix_cache())
                return "no block is cached" if is_empty else "blocks that requests use are still cached"
            case "start_profile":
                if not self._profile_folder:
                    raise ConfigError("start_profile: set VLLM_TORCH_PROFILER_DIR of the worker to a folder for traces")
                folder = Path(self._profile_folder)
                # Only the engine thread knows the device whose work is recorded.
                await self._engine.call(lambda engine: engine.start_profile(folder))
                return f"recording for {folder}"
            case "stop_profile":
                return str(await self._engine.call(lambda engine: engine.stop_profile()))

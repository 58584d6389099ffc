"""Executes operators' commands that routers pass on: reset the prefix cache, profile; sleep and new weights by
`sleep_and_reload.py`.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from baton_serve.contracts.messages import EngineCommand, EngineCommandDone
from baton_serve.engine import Engine
from baton_serve.engine.errors import ConfigError
from baton_serve.services.common.rpc.instance_link import RouterId
from baton_serve.services.instance.engine_thread import EngineThread
from baton_serve.services.instance.interfaces import RouterPort
from baton_serve.services.instance.sleep_and_reload import LOAD_FAILURES, ModelConflict, ModelSwitch

logger = logging.getLogger(__name__)


class EngineCommands:
    """Executes commands of operators that routers pass on (`EngineCommand`): forget the prefix cache, profile, sleep,
    load new weights. Use it only on the event loop.
    """

    def __init__(
        self,
        engine: Callable[[], EngineThread[Engine]],
        model: ModelSwitch,
        *,
        router: RouterPort,
        profile_folder: str,
    ) -> None:
        """Execute nothing yet. `engine` returns the thread of the present engine, or raises `ConfigError` if there is
        none that generates text. `model` changes the model.

        `profile_folder` gets the traces of profiles; it is empty if profiles are off.
        """
        self._engine = engine
        self._model = model
        self._router = router
        self._profile_folder = profile_folder
        self._tasks: set[asyncio.Task[None]] = set()

    def on_message(self, router: RouterId, command: EngineCommand) -> None:
        """Execute `command` in a task of its own, and answer `router` when it is done or has failed."""
        task = asyncio.get_running_loop().create_task(self._answer(router, command), name="engine command")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel running commands and wait for their end. The routers that sent the commands get no answer."""
        self._model.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _answer(self, router: RouterId, command: EngineCommand) -> None:
        error, is_conflict, result = None, False, ""
        try:
            result = await self._execute(command)
            logger.info("%s on request of a router: %s", command.action, result)
        except LOAD_FAILURES as exc:
            error, is_conflict = str(exc) or type(exc).__name__, isinstance(exc, ModelConflict)
            logger.warning("cannot execute %s: %s", command.action, exc)
        self._router.send(
            router,
            EngineCommandDone(request_id=command.request_id, error=error, is_conflict=is_conflict, result=result),
        )
        await self._model.publish()

    async def _execute(self, command: EngineCommand) -> str:
        """Execute `command` and return a text for the operator about its result. Raises an error of `LOAD_FAILURES` if
        it fails.
        """
        match command.action:
            case "reset_prefix_cache":
                is_empty = await self._engine().call(lambda engine: engine.reset_prefix_cache())
                return "no block is cached" if is_empty else "blocks that requests use are still cached"
            case "start_profile":
                engine = self._engine()
                if not self._profile_folder:
                    raise ConfigError("start_profile: set VLLM_TORCH_PROFILER_DIR of the worker to a folder for traces")
                folder = Path(self._profile_folder)
                # Only the engine thread knows the device whose work is recorded.
                await engine.call(lambda engine: engine.start_profile(folder))
                return f"recording for {folder}"
            case "stop_profile":
                return str(await self._engine().call(lambda engine: engine.stop_profile()))
            case _:
                return await self._model.run(command)

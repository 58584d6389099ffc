"""Find a LoRA adapter in a folder for a request whose model name no instance has, and load it."""

import asyncio
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from baton_serve.contracts.instance import MAX_ADAPTERS, AdapterRecord
from baton_serve.services.router.protocol.errors import ApiError

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Names that are looked up: one part of a path, and never `..`, so that a request cannot leave the folder."""
_MAX_CONFIG_BYTES = 1 << 20
_MAX_USES = 4 * MAX_ADAPTERS
"""Largest number of names whose last use is remembered."""
RETRY_AFTER_S = 30.0
"""Seconds for which a refused adapter is not loaded again; every request for it gets the same error."""


@dataclass(frozen=True, slots=True)
class FoundAdapter:
    """A LoRA adapter in the folder. `path` is its own folder; `base` is the model that it was trained for, according to
    its config, or None.
    """

    name: str
    path: str
    base: str | None


class AdapterFolder:
    """Loads LoRA adapters from a folder at the first request for them. An adapter is not loaded twice at the same time.
    Use it on the event loop only.

    `load` loads an adapter on all instances and raises `ApiError` if that fails.
    """

    def __init__(
        self,
        folder: Path,
        load: Callable[[FoundAdapter], Awaitable[None]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder.absolute()
        self._load = load
        self._clock = clock
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._refused: dict[str, tuple[float, ApiError]] = {}
        self._used_at: dict[str, float] = {}

    def on_use(self, name: str) -> None:
        """Record that a request uses the loaded adapter of this name now."""
        self._used_at.pop(name, None)
        self._used_at[name] = self._clock()
        # Adapters that clients load over HTTP and unload again must not fill the memory. The oldest comes first.
        if len(self._used_at) > _MAX_USES:
            del self._used_at[next(iter(self._used_at))]

    def least_recently_used(self, adapters: Iterable[AdapterRecord]) -> str | None:
        """Return the name of the adapter that was not used for the longest time, among the `adapters` that are from
        this folder; None if none is from this folder.

        It may be unloaded to make room: `resolve` loads it again.
        """
        own = [one.name for one in adapters if Path(one.path).parent == self._folder]
        return min(own, key=lambda name: (self._used_at.get(name, 0.0), name), default=None)

    async def resolve(self, name: str) -> None:
        """Load the adapter of this name on all instances if the folder has it; otherwise do nothing. Raises `ApiError`
        if an instance refuses it.
        """
        if _NAME.fullmatch(name) is None:
            return
        # No await lies between this look-up and the new entry, so that a name is never loaded twice at a time.
        if (task := self._loading.get(name)) is None:
            task = asyncio.get_running_loop().create_task(self._find_and_load(name), name="adapter of the folder")
            self._loading[name] = task
        # A client that disconnects must not cancel the load for the others.
        await asyncio.shield(task)

    async def _find_and_load(self, name: str) -> None:
        """Load the adapter of this name if the folder has it. If an instance refuses it, raise the same `ApiError` at
        later calls for a while.
        """
        try:
            if (found := await asyncio.to_thread(self._find, name)) is None:
                return
            self._refused = {key: one for key, one in self._refused.items() if one[0] > self._clock()}
            if name in self._refused:
                raise self._refused[name][1].with_traceback(None)
            await self._load(found)
            self.on_use(name)
        except ApiError as exc:
            logger.warning("cannot load LoRA adapter %s from %s: %s", name, self._folder, exc)
            # Errors of the server pass: the next request may find instances that answer.
            if exc.status < 500:
                self._refused.setdefault(name, (self._clock() + RETRY_AFTER_S, exc))
            raise
        finally:
            del self._loading[name]

    def _find(self, name: str) -> FoundAdapter | None:
        """Return the adapter of this name in the folder, or None if the folder has none with a readable PEFT config."""
        path = self._folder / name
        config = path / "adapter_config.json"
        try:
            if not config.is_file() or config.stat().st_size > _MAX_CONFIG_BYTES:
                return None
            read = json.loads(config.read_text())
        except (OSError, ValueError):
            return None
        base = read.get("base_model_name_or_path") if isinstance(read, dict) else None
        return FoundAdapter(name, str(path), base if isinstance(base, str) else None)

"""What callers used, exchanged between routers through Redis a few times a second; never on a request's path.

`baton:usage:<span>:<number>:<caller>` is a hash of each router's own counts, with a TTL. Telling it twice changes
nothing, and a store that was emptied knows all again after one exchange. While Redis is away each router counts alone.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from redis.exceptions import RedisError

from services.common.errors import RegistryUnavailable
from services.common.redis_client import connect_redis
from services.router.usage import UsageLedger, Used

logger = logging.getLogger(__name__)

EXCHANGE_S = 0.5

_EXCHANGE = """
local others = {}
for i, key in ipairs(KEYS) do
  redis.call('HSET', key, ARGV[1] .. ':requests', ARGV[3 * i - 1], ARGV[1] .. ':tokens', ARGV[3 * i])
  redis.call('EXPIRE', key, ARGV[3 * i + 1])
  local requests, tokens, found = 0, 0, redis.call('HGETALL', key)
  for n = 1, #found, 2 do
    local router, what = string.match(found[n], '^(.*):(%a+)$')
    if router ~= ARGV[1] then
      if what == 'requests' then requests = requests + found[n + 1] else tokens = tokens + found[n + 1] end
    end
  end
  others[2 * i - 1], others[2 * i] = requests, tokens
end
return others
"""


class UsageStore(Protocol):
    async def exchange(self, own: Sequence[Used]) -> list[Used]:
        """Tells what this router counted; returns what all others did. Raises `RegistryUnavailable`."""

    async def close(self) -> None: ...


class RedisUsageStore:
    def __init__(self, url: str) -> None:
        self._router = secrets.token_hex(8)
        self._redis = connect_redis(url)
        self._exchange = self._redis.register_script(_EXCHANGE)

    async def exchange(self, own: Sequence[Used]) -> list[Used]:
        keys = [f"baton:usage:{u.window.span_s}:{u.window.number}:{u.window.caller}" for u in own]
        args: list[str | int] = [self._router]
        for used in own:
            args += [used.requests, used.tokens, 2 * used.window.span_s]
        try:
            others = cast(list[int], await self._exchange(keys=keys, args=args))
        except (RedisError, OSError) as exc:
            raise RegistryUnavailable(f"Redis does not answer: {exc}") from exc
        return [Used(u.window, others[2 * i], others[2 * i + 1]) for i, u in enumerate(own)]

    async def close(self) -> None:
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()


class UsageExchange:
    """Runs from `start` to `close`."""

    def __init__(self, ledger: UsageLedger, store: UsageStore, *, wall_clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._store = store
        self._wall_clock = wall_clock
        self._is_away = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="usage")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self.exchange()
        await self._store.close()

    async def exchange(self) -> None:
        own = self._ledger.own(self._wall_clock())
        if not own:
            return
        try:
            self._ledger.learn(await self._store.exchange(own))
        except RegistryUnavailable as exc:
            if not self._is_away:
                logger.warning("limits of keys are counted by this router alone: %s", exc)
            self._is_away = True
        else:
            self._is_away = False

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(EXCHANGE_S)
            await self.exchange()

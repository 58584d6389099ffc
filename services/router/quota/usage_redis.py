"""Exchange the usage of API keys between routers through Redis.

The key `baton:usage:<span>:<number>:<caller>` holds a hash with the counts of each router in one window, and a TTL. A
router writes absolute counts, so writing twice changes nothing, and after a loss of Redis' data one exchange of each
router restores it.
"""

import contextlib
import secrets
from collections.abc import Sequence
from typing import cast

from redis.exceptions import RedisError

from baton_serve.services.common.errors import RegistryUnavailable
from baton_serve.services.common.registry.redis_registry import connect_redis
from baton_serve.services.router.quota.usage_limits import WindowUsage

# A script, so that one round trip writes this router's counts of all windows and reads the sums of the others.
# KEYS: one hash per window. ARGV: id of this router, then (requests, tokens, TTL in seconds) for each window.
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


class RedisUsageStore:
    """A `UsageStore` in the Redis of the registry. It owns its own connection."""

    def __init__(self, url: str) -> None:
        """Create the store without connecting; the first exchange connects. `url` is that of `--registry`."""
        # A new id for each process: a restarted router counts from 0 and must not overwrite what it counted before.
        self._router = secrets.token_hex(8)
        self._redis = connect_redis(url)
        self._exchange = self._redis.register_script(_EXCHANGE)

    async def exchange(self, own: Sequence[WindowUsage]) -> list[WindowUsage]:
        """Store what this router has counted in Redis, and return the sums of all other routers. Raises
        `RegistryUnavailable` if Redis does not answer.
        """
        keys = [f"baton:usage:{u.window.span_s}:{u.window.number}:{u.window.caller}" for u in own]
        args: list[str | int] = [self._router]
        for used in own:
            # Twice the window's length: a router may write to a window until shortly after its end.
            args += [used.requests, used.tokens, 2 * used.window.span_s]
        try:
            others = cast(list[int], await self._exchange(keys=keys, args=args))
        except (RedisError, OSError) as exc:
            raise RegistryUnavailable(f"Redis does not answer: {exc}") from exc
        return [WindowUsage(u.window, others[2 * i], others[2 * i + 1]) for i, u in enumerate(own)]

    async def close(self) -> None:
        """Close the connection to Redis."""
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()

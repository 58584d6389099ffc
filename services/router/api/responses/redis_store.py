"""Keep stored Responses in the registry's Redis, so that all routers of a cluster find them, also after a restart."""

import contextlib
from collections.abc import Awaitable
from typing import Any, TypeVar, cast

from redis.exceptions import RedisError

from baton_serve.services.common.registry.redis_registry import connect_redis
from baton_serve.services.router.api.responses.store import RUN_TTL_S
from baton_serve.services.router.protocol.errors import UnavailableError

T = TypeVar("T")

# A script, because the bound must hold for all routers together: without it, answers could fill the Redis on which the
# registry depends. Beyond the bound the oldest record of the owner with the most bytes is dropped. KEYS: the record,
# the records in the order of their ends, their sizes, the bytes of each owner, and the prefix of the owners' own
# orders. ARGV: record, TTL in ms, most bytes. The size of a deleted record counts until its TTL has passed.
_PUT = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function owner_of(key)
  return string.match(key, '^baton:response:([^:]*)')
end
local function drop(key)
  local owner = owner_of(key)
  redis.call('DEL', key)
  redis.call('ZREM', KEYS[2], key)
  redis.call('ZREM', KEYS[5] .. owner, key)
  local size = redis.call('HGET', KEYS[3], key)
  if size then
    redis.call('HINCRBY', KEYS[3], 'total', '-' .. size)
    redis.call('HDEL', KEYS[3], key)
    if tonumber(redis.call('ZINCRBY', KEYS[4], '-' .. size, owner)) <= 0 then
      redis.call('ZREM', KEYS[4], owner)
    end
  end
end
drop(KEYS[1])
local owner = owner_of(KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('ZADD', KEYS[2], now + ARGV[2], KEYS[1])
redis.call('ZADD', KEYS[5] .. owner, now + ARGV[2], KEYS[1])
redis.call('HSET', KEYS[3], KEYS[1], #ARGV[1])
redis.call('HINCRBY', KEYS[3], 'total', #ARGV[1])
redis.call('ZINCRBY', KEYS[4], #ARGV[1], owner)
for _, key in ipairs({KEYS[2], KEYS[3], KEYS[4], KEYS[5] .. owner}) do
  redis.call('PEXPIRE', key, ARGV[2])
end
while true do
  local oldest = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
  if #oldest == 0 then
    return 0
  end
  if tonumber(oldest[2]) <= now then
    drop(oldest[1])
  else
    local total = tonumber(redis.call('HGET', KEYS[3], 'total'))
    if total <= tonumber(ARGV[3]) then
      return total
    end
    local largest = redis.call('ZREVRANGE', KEYS[4], 0, 0)[1]
    drop(redis.call('ZRANGE', KEYS[5] .. (largest or ''), 0, 0)[1] or oldest[1])
  end
end
"""


class RedisResponseStore:
    """A `ResponseStore` in Redis. The Redis key `baton:response:<key>` holds an answer's record, and
    `baton:response-run:<key>` the state of the background request that computes it. Both have a TTL. It owns its own
    connection.
    """

    def __init__(self, url: str, ttl_s: float, max_bytes: int) -> None:
        """Create the store without connecting; the first command connects. `url` is that of `--registry`; records
        expire after `ttl_s` seconds.

        All routers together keep at most `max_bytes` of records; beyond it the owner with the most bytes loses its
        oldest record.
        """
        self._redis = connect_redis(url)
        self._max_bytes = max_bytes
        self._put = self._redis.register_script(_PUT)
        self._ttl_ms = max(1, int(ttl_s * 1e3))

    async def size(self, key: str) -> int:
        """Return the length of the record of a key in bytes, or 0 if there is none."""
        return int(await _answered(self._redis.strlen(_record(key))))

    async def get(self, key: str) -> bytes | None:
        """Return the record of a key, or None if there is none."""
        return cast(bytes | None, await _answered(self._redis.get(_record(key))))

    async def put(self, key: str, record: bytes) -> None:
        """Store the record of a key until its TTL has passed. If all records together then exceed `max_bytes`, delete
        old ones.
        """
        keys = [_record(key), *(f"baton:response-{name}" for name in ("order", "sizes", "owners", "order:"))]
        await _answered(self._put(keys=keys, args=[record, self._ttl_ms, self._max_bytes]))

    async def delete(self, key: str) -> bool:
        """Delete the record of a key. Return whether there was one."""
        return bool(await _answered(self._redis.delete(_record(key))))

    async def set_run(self, key: str, state: str) -> None:
        """Set the state of the background request that computes the answer of a key. It expires after `RUN_TTL_S`."""
        await _answered(self._redis.set(_run(key), state, px=int(RUN_TTL_S * 1e3)))

    async def run_state(self, key: str) -> str | None:
        """Return the state that `set_run` has set for a key, or None if there is none any more."""
        state = cast(bytes | None, await _answered(self._redis.get(_run(key))))
        return None if state is None else state.decode()

    async def end_run(self, key: str) -> None:
        """Delete the state of the background request of a key."""
        await _answered(self._redis.delete(_run(key)))

    async def close(self) -> None:
        """Close the connection to Redis."""
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()


async def _answered(command: Awaitable[T] | Any) -> T:
    """Wait for the answer of Redis to a command and return it. Raises `UnavailableError` if Redis does not answer."""
    try:
        return cast(T, await command)
    except (RedisError, OSError) as exc:
        raise UnavailableError(
            f"the store of responses does not answer, retry later: {exc}", retry_after_s=1.0, code="store_unavailable"
        ) from exc


def _record(key: str) -> str:
    return f"baton:response:{key}"


def _run(key: str) -> str:
    return f"baton:response-run:{key}"

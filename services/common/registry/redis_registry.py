"""The registry in Redis: records with a TTL, and how long routers keep them while Redis is out of reach.

    baton:instance:<id>     a record (MessagePack) with a TTL
    baton:instances         the set of all ids
    baton:generations:<id>  the generations of an instance, scored by the order of their first registration
    baton:epoch             a random mark, which disappears when the store is emptied
    baton:changes           the channel on which changes are published

Each operation is one Lua script, so operations cannot interleave. The scripts compute names of keys. Redis Cluster does
not allow that, so it is not supported. No token passes through Redis.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from typing import Protocol, cast

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.contracts.instance import InstanceRecord
from baton_serve.contracts.wire import Decoder, WireError, encode
from baton_serve.services.common.errors import RegistryUnavailable, Superseded
from baton_serve.services.common.process_lifecycle import call_each, cancel_all
from baton_serve.services.common.registry.port import without_load
from baton_serve.services.common.registry.record_table import GENERATIONS_KEPT

logger = logging.getLogger(__name__)

CHANNEL = "baton:changes"
REDIS_TIMEOUT_S = 2.0
"""Longest time for a connection or an answer."""
REFRESH_S = 1.0
"""Time between two reads of all records when no change is published."""
GRACE_S = 15.0
"""Time after an outage for which records of the last view are kept, so that their instances can register again."""
_MAX_RECORD_BYTES = 1024 * 1024
"""Largest record that is read. Records have some kilobytes."""
_GENERATIONS_TTL_S = 86_400
"""Time for which the generations of an instance that does not renew any more are remembered."""

# When an instance leaves, the member `left` is added with the highest score. Then no earlier generation is the newest
# one, so none of them can register again.
_REGISTER = f"""
local newest = redis.call('ZREVRANGE', KEYS[2], 0, 0, 'WITHSCORES')
if not redis.call('ZSCORE', KEYS[2], ARGV[1]) then
  redis.call('ZADD', KEYS[2], (newest[2] or 0) + 1, ARGV[1])
  redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -{GENERATIONS_KEPT} - 1)
elseif newest[1] ~= ARGV[1] then
  return 0
end
redis.call('EXPIRE', KEYS[2], {_GENERATIONS_TTL_S})
local is_change = ARGV[4] == '1' or redis.call('EXISTS', KEYS[1]) == 0
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
redis.call('SADD', 'baton:instances', ARGV[5])
if is_change then redis.call('PUBLISH', '{CHANNEL}', 'changed') end
return 1
"""
_LEAVE = f"""
local newest = redis.call('ZREVRANGE', KEYS[2], 0, 0, 'WITHSCORES')
if newest[1] ~= ARGV[1] then return 0 end
redis.call('ZADD', KEYS[2], newest[2] + 1, 'left')
redis.call('DEL', KEYS[1])
redis.call('SREM', 'baton:instances', ARGV[2])
redis.call('PUBLISH', '{CHANNEL}', 'left ' .. ARGV[1] .. ' ' .. ARGV[2])
return 1
"""
# An id without a record has expired; it is removed from the set here, since Redis expires the record alone.
# A key of another type, or a value that is too long for a record, is ignored: other programs may use the same Redis.
_READ_ALL = f"""
redis.call('SET', 'baton:epoch', ARGV[1], 'NX')
local found = {{redis.call('GET', 'baton:epoch')}}
for _, id in ipairs(redis.call('SMEMBERS', 'baton:instances')) do
  local size = redis.pcall('STRLEN', 'baton:instance:' .. id)
  if size == 0 then
    redis.call('SREM', 'baton:instances', id)
  elseif type(size) == 'number' and size <= {_MAX_RECORD_BYTES} then
    found[#found + 1] = redis.call('GET', 'baton:instance:' .. id)
  end
end
return found
"""


def connect_redis(url: str) -> redis.asyncio.Redis:
    """Return a Redis client with short timeouts and without retries, so that callers notice an outage immediately.

    It connects at its first command. `url` is `redis://…`, `rediss://…` (TLS; `?ssl_ca_certs=FILE`) or `unix://…`. A
    user of an ACL is given as `redis://USER:PASSWORD@…`.
    """
    return redis.asyncio.Redis.from_url(
        url,
        socket_timeout=REDIS_TIMEOUT_S,
        socket_connect_timeout=REDIS_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=0,
    )


class _Script(Protocol):
    """The type of a Lua script that is registered with a Redis client. It is declared here because the type stubs of
    redis-py lack it.
    """

    async def __call__(self, *, keys: list[str], args: list[bytes | str | int]) -> object: ...


def _script(client: redis.asyncio.Redis, text: str) -> _Script:
    return cast(_Script, client.register_script(text))


class RedisRegistryClient:
    """Registers one instance in the registry in Redis. Implements `RegistryClient`."""

    def __init__(self, url: str) -> None:
        self._redis = connect_redis(url)
        self._register = _script(self._redis, _REGISTER)
        self._leave = _script(self._redis, _LEAVE)
        self._last: InstanceRecord | None = None

    async def register(self, record: InstanceRecord, ttl_s: float) -> None:
        # A renewal that changes the load alone is not published: routers get the load by RPC.
        is_change = self._last is None or without_load(self._last) != without_load(record)
        args: list[bytes | str | int] = [str(record.generation), encode(record), max(1, round(ttl_s * 1000))]
        in_force = await self._run(self._register, record.instance, [*args, int(is_change), record.instance])
        if not in_force:
            raise Superseded(f"{record.instance}: another process has registered under this name")
        self._last = record

    async def leave(self, instance: InstanceId, generation: Generation) -> None:
        await self._run(self._leave, instance, [str(generation), instance])

    async def close(self) -> None:
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()

    async def _run(self, script: _Script, instance: InstanceId, args: list[bytes | str | int]) -> object:
        keys = [f"baton:instance:{instance}", f"baton:generations:{instance}"]
        try:
            return await script(keys=keys, args=args)
        except (RedisError, OSError) as exc:
            raise RegistryUnavailable(f"Redis does not answer: {exc}") from exc


class RedisRegistryView:
    """Reads the records of all instances from Redis: when a change is published there, and every `refresh_s` seconds,
    because a publication can be missed. After an outage it keeps the records that it knew for `grace_s` seconds.

    Implements `RegistryView`.
    """

    def __init__(self, url: str, *, refresh_s: float = REFRESH_S, grace_s: float = GRACE_S) -> None:
        self._refresh_s = refresh_s
        self._grace_s = grace_s
        self._redis = connect_redis(url)
        self._read_all = _script(self._redis, _READ_ALL)
        self._decoder = Decoder[InstanceRecord](InstanceRecord)
        self._records: dict[InstanceId, InstanceRecord] = {}
        self._is_connected = False
        self._has_read = False
        self._epoch: bytes | None = None
        self._grace_ends = 0.0
        self._is_due = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        await self._refresh()
        self._tasks = [
            asyncio.create_task(self._keep_fresh(), name="registry-refresh"),
            asyncio.create_task(self._listen(), name="registry-changes"),
        ]

    def records(self) -> list[InstanceRecord]:
        return sorted(self._records.values(), key=lambda record: record.instance)

    def is_connected(self) -> bool:
        return self._is_connected

    async def close(self) -> None:
        await cancel_all(self._tasks)
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()

    async def _keep_fresh(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._refresh_s):
                    await self._is_due.wait()
            self._is_due.clear()
            await self._refresh()

    async def _listen(self) -> None:
        while True:
            try:
                async with self._redis.pubsub(ignore_subscribe_messages=True) as channel:
                    await channel.subscribe(CHANNEL)
                    # Changes before this subscription were missed, so read once now.
                    self._is_due.set()
                    while True:
                        message = await channel.get_message(timeout=REDIS_TIMEOUT_S / 2)
                        if message is not None:
                            self._on_publication(bytes(message["data"]).decode(errors="replace").split(" ", 2))
            except (RedisError, OSError):
                # `_refresh` also fails during the outage, and logs it.
                await asyncio.sleep(self._refresh_s)

    def _on_publication(self, words: list[str]) -> None:
        # Immediately remove an instance that has left, without a read: requests must not be placed on it any more.
        # During the grace period after an outage a read would not remove it either.
        if words[0] == "left" and len(words) == 3:
            record = self._records.get(InstanceId(words[2]))
            if record is not None and str(record.generation) == words[1]:
                del self._records[record.instance]
                call_each("a change of the registry", [self._on_change])
        self._is_due.set()

    async def _refresh(self) -> None:
        try:
            found = cast(list[bytes], await self._read_all(keys=[], args=[secrets.token_hex(8)]))
        except (RedisError, OSError) as exc:
            if self._is_connected:
                logger.warning("the connection to the registry is lost, using the last known instances: %s", exc)
                self._is_connected = False
                call_each("a change of the registry", [self._on_change])
            elif not self._has_read:
                logger.warning("the registry does not answer, no instance is known until it does: %s", exc)
            self._has_read = True
            return
        self._has_read = True
        self._apply(found[0], [record for data in found[1:] if (record := self._decode(data)) is not None])

    def _apply(self, epoch: bytes, found: list[InstanceRecord]) -> None:
        now = asyncio.get_running_loop().time()
        was_connected, self._is_connected = self._is_connected, True
        if self._epoch is not None and (epoch != self._epoch or not was_connected):
            # After an outage, or if the store was emptied, instances need time to register again.
            self._grace_ends = now + self._grace_s
        self._epoch = epoch
        kept = self._records if now < self._grace_ends else {}
        records = {**kept, **{record.instance: record for record in found}}
        before = {name: without_load(record) for name, record in self._records.items()}
        self._records = records
        if not was_connected:
            logger.info("connected to the registry", extra={"instances": len(records)})
        if not was_connected or before != {name: without_load(record) for name, record in records.items()}:
            call_each("a change of the registry", [self._on_change])

    def _decode(self, data: bytes) -> InstanceRecord | None:
        try:
            return self._decoder.decode(data)
        except WireError as exc:
            logger.warning("a record in the registry is ignored, it cannot be decoded: %s", exc)
            return None

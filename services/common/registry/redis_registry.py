"""The registry in Redis, for clusters over several hosts.

`baton:instance:<id>` is a record (MessagePack) with a TTL, `baton:instances` the set of ids, `baton:generations:<id>`
the generations of an instance scored by the order of their first registration, `baton:epoch` a mark that vanishes when
the store is emptied, and `baton:changes` the channel of news. Each operation is one script, so no two of them can
interleave; the scripts name keys that they compute, so Redis Cluster is not supported. Nothing here lies on the path
of a token.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from typing import Protocol, cast

import redis.asyncio
from redis.exceptions import RedisError

from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.contracts.instance import InstanceRecord
from baton_serve.contracts.wire import Decoder, WireError, encode
from baton_serve.services.common.callbacks import call_each
from baton_serve.services.common.errors import RegistryUnavailable, Superseded
from baton_serve.services.common.lifecycle import cancel_all
from baton_serve.services.common.redis_client import REDIS_TIMEOUT_S, connect_redis
from baton_serve.services.common.registry.port import without_load
from baton_serve.services.common.registry.table import GENERATIONS_KEPT

logger = logging.getLogger(__name__)

CHANNEL = "baton:changes"
REFRESH_S = 1.0
GRACE_S = 15.0
"""After an outage: how long a record of the last view is kept for its instance to register again."""
_GENERATIONS_TTL_S = 86_400

# An instance that left is marked by the member `left`, newer than all its generations so far.
_REGISTER = f"""
local newest = redis.call('ZREVRANGE', KEYS[2], 0, 0, 'WITHSCORES')
if not redis.call('ZSCORE', KEYS[2], ARGV[1]) then
  redis.call('ZADD', KEYS[2], (newest[2] or 0) + 1, ARGV[1])
  redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -{GENERATIONS_KEPT} - 1)
elseif newest[1] ~= ARGV[1] then
  return 0
end
redis.call('EXPIRE', KEYS[2], {_GENERATIONS_TTL_S})
local is_news = ARGV[4] == '1' or redis.call('EXISTS', KEYS[1]) == 0
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
redis.call('SADD', 'baton:instances', ARGV[5])
if is_news then redis.call('PUBLISH', '{CHANNEL}', 'changed') end
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
_LOOK = """
redis.call('SET', 'baton:epoch', ARGV[1], 'NX')
local found = {redis.call('GET', 'baton:epoch')}
for _, id in ipairs(redis.call('SMEMBERS', 'baton:instances')) do
  local record = redis.call('GET', 'baton:instance:' .. id)
  if record then found[#found + 1] = record else redis.call('SREM', 'baton:instances', id) end
end
return found
"""


class _Script(Protocol):
    async def __call__(self, *, keys: list[str], args: list[bytes | str | int]) -> object: ...


def _script(client: redis.asyncio.Redis, text: str) -> _Script:
    return cast(_Script, client.register_script(text))


class RedisRegistryClient:
    """The instance's side."""

    def __init__(self, url: str) -> None:
        self._redis = connect_redis(url)
        self._register = _script(self._redis, _REGISTER)
        self._leave = _script(self._redis, _LEAVE)
        self._last: InstanceRecord | None = None

    async def register(self, record: InstanceRecord, ttl_s: float) -> None:
        is_news = self._last is None or without_load(self._last) != without_load(record)
        args: list[bytes | str | int] = [str(record.generation), encode(record), max(1, round(ttl_s * 1000))]
        in_force = await self._run(self._register, record.instance, [*args, int(is_news), record.instance])
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
    """The router's side: looks when told of news, and once per `REFRESH_S` anyway, since news can be missed."""

    def __init__(self, url: str, *, refresh_s: float = REFRESH_S, grace_s: float = GRACE_S) -> None:
        self._refresh_s = refresh_s
        self._grace_s = grace_s
        self._redis = connect_redis(url)
        self._look = _script(self._redis, _LOOK)
        self._decoder = Decoder[InstanceRecord](InstanceRecord)
        self._records: dict[InstanceId, InstanceRecord] = {}
        self._is_connected = False
        self._has_looked = False
        self._epoch: bytes | None = None
        self._grace_ends = 0.0
        self._is_due = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        await self._refresh()
        self._tasks = [
            asyncio.create_task(self._keep_fresh(), name="registry-refresh"),
            asyncio.create_task(self._listen(), name="registry-news"),
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
                async with self._redis.pubsub(ignore_subscribe_messages=True) as news:
                    await news.subscribe(CHANNEL)
                    self._is_due.set()
                    while True:
                        message = await news.get_message(timeout=REDIS_TIMEOUT_S / 2)
                        if message is not None:
                            self._take_news(bytes(message["data"]).decode().split(" ", 2))
            except (RedisError, OSError):
                # `_refresh` meets the same outage and reports it.
                await asyncio.sleep(self._refresh_s)

    def _take_news(self, words: list[str]) -> None:
        if words[0] == "left" and len(words) == 3:
            record = self._records.get(InstanceId(words[2]))
            if record is not None and str(record.generation) == words[1]:
                del self._records[record.instance]
                call_each("a change of the registry", [self._on_change])
        self._is_due.set()

    async def _refresh(self) -> None:
        try:
            found = cast(list[bytes], await self._look(keys=[], args=[secrets.token_hex(8)]))
        except (RedisError, OSError) as exc:
            if self._is_connected:
                logger.warning("registry lost, serving on from the last view: %s", exc)
                self._is_connected = False
                call_each("a change of the registry", [self._on_change])
            elif not self._has_looked:
                logger.warning("the registry does not answer: no instance is known until it does: %s", exc)
            self._has_looked = True
            return
        self._has_looked = True
        self._apply(found[0], [record for data in found[1:] if (record := self._decode(data)) is not None])

    def _apply(self, epoch: bytes, found: list[InstanceRecord]) -> None:
        now = asyncio.get_running_loop().time()
        was_connected, self._is_connected = self._is_connected, True
        if self._epoch is not None and (epoch != self._epoch or not was_connected):
            # An outage, or a store that was emptied: instances need time to register again.
            self._grace_ends = now + self._grace_s
        self._epoch = epoch
        kept = self._records if now < self._grace_ends else {}
        records = {**kept, **{record.instance: record for record in found}}
        before = {name: without_load(record) for name, record in self._records.items()}
        self._records = records
        if not was_connected:
            logger.info("registry connected", extra={"instances": len(records)})
        if not was_connected or before != {name: without_load(record) for name, record in records.items()}:
            call_each("a change of the registry", [self._on_change])

    def _decode(self, data: bytes) -> InstanceRecord | None:
        try:
            return self._decoder.decode(data)
        except WireError as exc:
            logger.warning("record in the registry refused: %s", exc)
            return None

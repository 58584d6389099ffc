"""Keep answers in the registry's Redis, so that all routers of a cluster find them, also after a restart."""

import contextlib
from collections.abc import Awaitable
from typing import Any, TypeVar, cast

from redis.exceptions import RedisError

from baton_serve.services.common.registry.redis_registry import connect_redis
from baton_serve.services.router.api.responses.store import RUN_TTL_S
from baton_serve.services.router.protocol.errors import UnavailableError

T = TypeVar("T")


class RedisResponseStore:
    """A `ResponseStore` on Redis. The key `baton:response:<key>` holds a record, and `baton:response-run:<key>` the
    state of its run. Both have a TTL. Owns its own connection.
    """

    def __init__(self, url: str, ttl_s: float) -> None:
        """Create the store without connecting; the first command connects. `url` is that of `--registry`."""
        self._redis = connect_redis(url)
        self._ttl_ms = max(1, int(ttl_s * 1e3))

    async def get(self, key: str) -> bytes | None:
        """Return the record of a key, or None."""
        return cast(bytes | None, await _answered(self._redis.get(_record(key))))

    async def put(self, key: str, record: bytes) -> None:
        """Keep a record until its TTL has passed."""
        await _answered(self._redis.set(_record(key), record, px=self._ttl_ms))

    async def delete(self, key: str) -> bool:
        """Forget a record. Return whether there was one."""
        return bool(await _answered(self._redis.delete(_record(key))))

    async def set_run(self, key: str, state: str) -> None:
        """Set the state of a run."""
        await _answered(self._redis.set(_run(key), state, px=int(RUN_TTL_S * 1e3)))

    async def run_state(self, key: str) -> str | None:
        """Return the state of a run."""
        state = cast(bytes | None, await _answered(self._redis.get(_run(key))))
        return None if state is None else state.decode()

    async def end_run(self, key: str) -> None:
        """Forget the state of a run."""
        await _answered(self._redis.delete(_run(key)))

    async def close(self) -> None:
        """Close the connection to Redis."""
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()


async def _answered(command: Awaitable[T] | Any) -> T:
    """Return the answer of Redis. Raises `UnavailableError` if it does not answer."""
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

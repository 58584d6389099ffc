"""How every process connects to Redis: short timeouts, and no retries inside the client, so that an outage is seen."""

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

REDIS_TIMEOUT_S = 2.0


def connect_redis(url: str) -> redis.asyncio.Redis:
    """`redis://`, `rediss://` (TLS; `?ssl_ca_certs=FILE`) or `unix://`, with an ACL user as `redis://USER:PASSWORD@…`."""
    return redis.asyncio.Redis.from_url(
        url,
        socket_timeout=REDIS_TIMEOUT_S,
        socket_connect_timeout=REDIS_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=0,
    )

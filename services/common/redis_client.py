"""Connects to Redis with short timeouts and without retries in the client, so that callers notice an outage at once."""

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

REDIS_TIMEOUT_S = 2.0
"""Longest time for a connection or an answer."""


def connect_redis(url: str) -> redis.asyncio.Redis:
    """Return a client; it connects at its first command.

    `url` is `redis://…`, `rediss://…` (TLS; `?ssl_ca_certs=FILE`) or `unix://…`. A user of an ACL is given as
    `redis://USER:PASSWORD@…`.
    """
    return redis.asyncio.Redis.from_url(
        url,
        socket_timeout=REDIS_TIMEOUT_S,
        socket_connect_timeout=REDIS_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=0,
    )

"""Decides whether the registry and other processes of the cluster can be reached from this machine."""

import asyncio
import time
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import redis.asyncio
from redis.exceptions import AuthenticationError, RedisError

from baton_serve.services.doctor.findings import Finding, ok, problem, warning

TIMEOUT_S = 3.0
"""Longest time for one connection or one answer."""
SLOW_ANSWER_S = 0.05
"""Round-trip time to Redis above which the finding is a warning."""


async def check_network(registry: str, peers: list[str]) -> AsyncIterator[Finding]:
    """Try to reach the registry at the URL `registry` (none if it is empty) and each peer (HOST:PORT), and yield a
    finding for each.
    """
    # A memory:// registry lives inside a router, which is tried like any peer.
    if registry.startswith("memory://"):
        peers = [urlsplit(registry).netloc, *peers]
    elif registry:
        yield await _redis(registry)
    for peer in peers:
        yield await _peer(peer)


async def _redis(url: str) -> Finding:
    # Only the host is printed: the URL may contain a password. A unix:// URL has a path in place of a host.
    where = urlsplit(url).hostname or urlsplit(url).path
    try:
        client = redis.asyncio.Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
    except ValueError as exc:
        return problem("redis", f"--registry is not a Redis URL: {exc}", "use redis://:PASSWORD@HOST:6379/0")
    began = time.perf_counter()
    try:
        await client.ping()
        seconds = time.perf_counter() - began
        version = (await client.info("server"))["redis_version"]
    except AuthenticationError:
        return problem(
            "redis",
            f"{where} refuses the password",
            "give the correct one: --registry redis://:PASSWORD@HOST:6379/0; Helm redis.external",
        )
    except (RedisError, OSError) as exc:
        return problem(
            "redis", f"{where} does not answer: {exc}", "check the host, the port, TLS (rediss://) and NetworkPolicy"
        )
    finally:
        await client.aclose()
    text = f"{where} runs Redis {version} and answers within {seconds * 1e3:.1f} ms"
    if seconds > SLOW_ANSWER_S:
        return warning(
            "redis", text, "use a Redis that is nearer: instances renew their records there every few seconds"
        )
    return ok("redis", text)


async def _peer(address: str) -> Finding:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return problem("peers", f"--peer {address!r} is not HOST:PORT", "give a router or an instance as HOST:PORT")
    began = time.perf_counter()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            # An IPv6 address is written in brackets before a port, but connected to without them.
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError) as exc:
        # `TimeoutError` has no text of its own.
        reason = getattr(exc, "strerror", None) or str(exc) or "no answer"
        remedy = "check that it runs and that firewalls and NetworkPolicy allow the port (Helm uses 7001 to 7004)"
        return problem("peers", f"{address} cannot be reached: {reason}", remedy)
    writer.close()
    return ok("peers", f"{address} accepts connections within {(time.perf_counter() - began) * 1e3:.1f} ms")

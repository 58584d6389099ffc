"""Can the registry and the peers be reached from here?"""

import asyncio
import time
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import redis.asyncio
from redis.exceptions import AuthenticationError, RedisError

from baton_serve.services.doctor.findings import Finding, ok, problem, warning

TIMEOUT_S = 3.0
SLOW_ANSWER_S = 0.05


async def check_network(registry: str, peers: list[str]) -> AsyncIterator[Finding]:
    if registry.startswith("memory://"):
        peers = [urlsplit(registry).netloc, *peers]
    elif registry:
        yield await _redis(registry)
    for peer in peers:
        yield await _peer(peer)


async def _redis(url: str) -> Finding:
    where = urlsplit(url).hostname or urlsplit(url).path
    try:
        client = redis.asyncio.Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
    except ValueError as exc:
        return problem("redis", f"--registry is no URL of Redis: {exc}", "redis://:PASSWORD@HOST:6379/0")
    began = time.perf_counter()
    try:
        await client.ping()
        seconds = time.perf_counter() - began
        version = (await client.info("server"))["redis_version"]
    except AuthenticationError:
        return problem("redis", f"{where} refuses the password", "redis://:PASSWORD@HOST:6379/0; Helm redis.external")
    except (RedisError, OSError) as exc:
        return problem(
            "redis", f"{where} does not answer: {exc}", "check host, port, TLS (rediss://) and NetworkPolicy"
        )
    finally:
        await client.aclose()
    text = f"{where} is Redis {version}, {seconds * 1e3:.1f} ms away"
    if seconds > SLOW_ANSWER_S:
        return warning("redis", text, "records are renewed every few seconds: bring it nearer")
    return ok("redis", text)


async def _peer(address: str) -> Finding:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return problem("peers", f"{address!r} is not HOST:PORT", "name a router or an instance as HOST:PORT")
    began = time.perf_counter()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError) as exc:
        reason = getattr(exc, "strerror", None) or str(exc) or "no answer"
        remedy = "is it running, and is the port open in firewalls and NetworkPolicy? In Helm: 7001 to 7004"
        return problem("peers", f"{address} cannot be reached: {reason}", remedy)
    writer.close()
    return ok("peers", f"{address} answers, {(time.perf_counter() - began) * 1e3:.1f} ms away")

"""Serves an instance's /health, /ping, /metrics and /admin/drain, and decides who may drain it.

They know no requests. A client on this machine with this process's user or root needs no key, because it could end the
process anyway; all other clients of /admin/drain need the cluster key.

`owners` finds the user at the other end of a connection within this machine, in the kernel's table of connections.
"""

import ipaddress
import logging
import os
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.contracts.instance import KernelVerdict, LinkStatus, Load, Role
from baton_serve.services.common.cluster_key import ClusterKey

# One line per end of a connection: its own address, the peer's address, its state, and further on its user id.
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED = "01"
"""The only state that counts. In other states a connection may have lost its owner, and is then shown as root's."""

Address = tuple[str, int]
"""IP address and port."""


def owners(client: Address, server: Address, tables: Iterable[Path] = TABLES) -> set[int]:
    """Return the user ids of the processes that own the client's end of a TCP connection from `client` to the port of
    `server`, usually one.

    `tables` are the kernel's lists of TCP connections. The set is empty if the client is on another machine, if it has
    closed the connection, or if no table can be read.
    """
    # Only the port of the server is compared: it may listen on several addresses.
    wanted = (_plain(client[0]), client[1], server[1])
    found: set[int] = set()
    for table in tables:
        with suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                local, remote, state, *rest = line.split()[1:]
                if state == _ESTABLISHED and (*_parsed(local), _parsed(remote)[1]) == wanted:
                    found.add(int(rest[3]))
    return found


def _parsed(text: str) -> Address:
    """Parse an address in the form of the kernel's tables, such as `0100007F:1F90`: words of 32 bits in the byte order
    of the machine, and the port. Return (IP address as text, port).
    """
    digits, _, port = text.partition(":")
    words = [int(digits[at : at + 8], 16).to_bytes(4, "little") for at in range(0, len(digits), 8)]
    return _plain(ipaddress.ip_address(b"".join(words))), int(port, 16)


def _plain(address: "str | ipaddress.IPv4Address | ipaddress.IPv6Address") -> str:
    """Return an IP address as text. An IPv4 address that is mapped to IPv6 (`::ffff:…`) is returned as IPv4."""
    found = ipaddress.ip_address(address) if isinstance(address, str) else address
    return str((isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped) or found)


logger = logging.getLogger(__name__)


class HealthStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of an instance to `GET /health`.

    `links` has one entry for each other instance that sends KV blocks here: the transport and its measured speed, so
    that a slow transport does not stay unnoticed.
    """

    status: str
    role: Role
    instance: InstanceId
    generation: Generation
    pid: int
    model: str
    device: str
    uptime_s: float
    load: Load
    links: list[LinkStatus]
    routers: int
    requests: int
    """Running requests; a drain waits for them."""
    step_age_s: float
    """Seconds for which the current step of the engine has run; 0 if it is idle."""
    wrong_kernels: list[KernelVerdict] = []
    """Kernels and captured graphs that were wrong on this device at the start, so that others serve."""


class Drained(msgspec.Struct, frozen=True):
    """The answer of an instance to `POST /admin/drain`."""

    status: str
    instance: InstanceId
    generation: Generation
    requests: int


def create_app(
    health: Callable[[], HealthStatus],
    metrics: CollectorRegistry,
    *,
    drain: Callable[[bool], Awaitable[None]],
    key: ClusterKey | None,
) -> Starlette:
    """Return the HTTP application (ASGI) of an instance: health, metrics and drain. `drain(exit_afterwards)` must
    return as soon as new requests are refused. `key` authenticates operators from other machines.
    """

    async def show_health(_: Request) -> Response:
        found = health()
        # A failed instance ends within seconds. Until then probes must not count it as alive.
        status = 503 if found.status == "failed" else 200
        return Response(msgspec.json.encode(found), status_code=status, media_type="application/json")

    async def show_metrics(_: Request) -> Response:
        return Response(generate_latest(metrics), media_type=CONTENT_TYPE_LATEST)

    async def start_drain(request: Request) -> Response:
        host = request.client.host if request.client is not None else ""
        if not is_operator(request, key):
            logger.warning(
                "refused a drain request: no cluster key and not a local client of the same user",
                extra={"client": host},
            )
            return _error(
                403, "clients on other machines or of other users need the cluster key (see `baton drain --help`)"
            )
        exit_value = request.query_params.get("exit", "1")
        if exit_value not in ("0", "1"):
            return _error(
                400,
                f"exit={exit_value} is invalid: use exit=1 to end the process after the drain, exit=0 to keep it",
            )
        logger.info("drain requested over HTTP", extra={"client": host, "exit": exit_value})
        await drain(exit_value == "1")
        found = health()
        answer = Drained(found.status, found.instance, found.generation, found.requests)
        return Response(msgspec.json.encode(answer), status_code=202, media_type="application/json")

    routes = [Route("/health", show_health), Route("/ping", show_health), Route("/metrics", show_metrics)]
    routes.append(Route("/admin/drain", start_drain, methods=["POST"]))
    return Starlette(routes=routes)


def is_operator(request: Request, key: ClusterKey | None) -> bool:
    """Return whether a request may drain this instance: it has the cluster key, or comes from a local process of this
    user or root.

    Requests with an Origin header need the key. A web page in the browser of this user would pass the other check, but
    does not act for the user; browsers add that header to each POST.
    """
    if key is not None and key.is_admin(request.headers.get("authorization", "")):
        return True
    client, server = request.client, request.scope.get("server")
    if client is None or server is None or "origin" in request.headers:
        return False
    # The kernel's table of TCP connections gives the user of the client's end; it is empty for remote clients.
    found = owners((client.host, client.port), server)
    return bool(found) and found <= {0, os.geteuid()}


def _error(status: int, message: str) -> Response:
    body = msgspec.json.encode({"error": {"message": message}})
    return Response(body, status_code=status, media_type="application/json")

"""Decides which addresses an instance binds, and which it advertises to routers and peers."""

import socket
from pathlib import Path
from urllib.parse import urlsplit

from baton_serve.services.common.rpc.connections import ANY_UNIX_SOCKET
from baton_serve.services.instance.errors import StartFailed
from baton_serve.services.instance.settings import InstanceSettings, advertised_host

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""File with an id that is random for each boot of the kernel, and equal in all containers of a machine."""


def tcp(settings: InstanceSettings, port: int, *, any_port: str = "0") -> str:
    """Return the address `tcp://HOST:PORT` that the instance binds. If `port` is 0, `any_port` stands for it, with
    which the caller's library chooses a free port.
    """
    return f"tcp://{_bracketed(settings.host)}:{port or any_port}"


def for_routers(settings: InstanceSettings) -> str:
    """Return the address on which the instance accepts connections of routers: a TCP port, or with `--rpc-socket` a
    Unix socket.
    """
    return ANY_UNIX_SOCKET if settings.rpc_socket else tcp(settings, settings.rpc_port)


def advertised(settings: InstanceSettings, bound: str) -> str:
    """Return the address under which other processes reach a port or socket of this instance that was
    bound at `bound`.
    """
    # A Unix socket has the same name for all processes of the machine.
    if bound.startswith("ipc:"):
        return bound
    return f"tcp://{_bracketed(advertised_host(settings))}:{urlsplit(bound).port}"


def advertised_http(settings: InstanceSettings, port: int) -> str:
    """Return `HOST:PORT` of the instance's HTTP endpoints (/health, /metrics) as the registry shows it."""
    return f"{_bracketed(advertised_host(settings))}:{port}"


def check_ports(settings: InstanceSettings) -> None:
    """Check that the configured ports are free before the model is loaded, which can take minutes.

    Raises `StartFailed` if a port is in use, if `--host` is not an address of this machine, or if flags contradict each
    other.
    """
    if settings.rpc_socket and settings.rpc_port:
        raise StartFailed(
            "--rpc-socket accepts requests on a Unix socket instead of a port: remove --rpc-port or --rpc-socket"
        )
    ports = {
        "--http-port": settings.http_port,
        "--rpc-port": settings.rpc_port,
        "--transfer-port": settings.transfer_port,
        "--events-port": settings.events_port,
    }
    for flag, port in ports.items():
        _try_to_bind(settings.host, port, flag)


def shared_memory_host() -> str:
    """Return an id that is equal for all processes that can share memory, that is, those under the same
    running kernel.
    """
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else socket.gethostname()


def _try_to_bind(host: str, port: int, flag: str) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as exc:
        raise StartFailed(f"--host {host}: {exc.strerror or exc}; give an address of this machine") from exc
    with bound:
        # As the real servers do: a connection in TIME_WAIT from a previous process must not count as "in use".
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(address)
        except OSError as exc:
            remedy = "choose another port, or 0 for a free one"
            raise StartFailed(f"{flag} {port} on {host}: {exc.strerror or exc}; {remedy}") from exc


def _bracketed(host: str) -> str:
    # IPv6 addresses need brackets in front of a port.
    return f"[{host}]" if ":" in host else host

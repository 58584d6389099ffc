"""Where an instance listens, and how others reach it."""

import socket
from pathlib import Path
from urllib.parse import urlsplit

from baton_serve.services.common.zmq.zmtp_sockets import ANY_UNIX_SOCKET
from baton_serve.services.instance.errors import StartFailed
from baton_serve.services.instance.settings import InstanceSettings, advertised_host

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def tcp(settings: InstanceSettings, port: int, *, any_port: str = "0") -> str:
    """ZeroMQ address to bind."""
    return f"tcp://{_bracketed(settings.host)}:{port or any_port}"


def for_routers(settings: InstanceSettings) -> str:
    """Where requests are taken."""
    return ANY_UNIX_SOCKET if settings.rpc_socket else tcp(settings, settings.rpc_port)


def advertised(settings: InstanceSettings, bound: str) -> str:
    """What others connect to, for an address that was bound. A Unix socket has one name for all."""
    if bound.startswith("ipc:"):
        return bound
    return f"tcp://{_bracketed(advertised_host(settings))}:{urlsplit(bound).port}"


def advertised_http(settings: InstanceSettings, port: int) -> str:
    return f"{_bracketed(advertised_host(settings))}:{port}"


def check_ports(settings: InstanceSettings) -> None:
    """Raises `StartFailed` for a fixed port that is in use. Loading a model takes long: better now than then."""
    if settings.rpc_socket and settings.rpc_port:
        raise StartFailed("--rpc-socket takes requests at a Unix socket, not at a port: leave out --rpc-port")
    ports = {
        "--http-port": settings.http_port,
        "--rpc-port": settings.rpc_port,
        "--transfer-port": settings.transfer_port,
        "--events-port": settings.events_port,
    }
    for flag, port in ports.items():
        _try_to_bind(settings.host, port, flag)


def shared_memory_host() -> str:
    """Equal for processes of one running kernel."""
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else socket.gethostname()


def _try_to_bind(host: str, port: int, flag: str) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as exc:
        raise StartFailed(f"--host {host}: {exc.strerror or exc}; name an address of this machine") from exc
    with bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(address)
        except OSError as exc:
            remedy = "choose another, or 0 for a free one"
            raise StartFailed(f"{flag} {port} on {host}: {exc.strerror or exc}; {remedy}") from exc


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host

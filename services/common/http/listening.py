"""Sockets that processes listen on."""

import socket

from baton_serve.services.common.errors import ConfigurationError


def bind_tcp(host: str, port: int, *, shares_port: bool = False, listens: bool = True) -> socket.socket:
    """A listening-ready socket; without `listens` one that only holds the port. Raises `ConfigurationError` that names
    the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        if shares_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
        if listens:
            bound.listen(2048)
    except (OSError, OverflowError) as exc:
        bound.close()
        reason = getattr(exc, "strerror", None) or exc
        raise ConfigurationError(f"cannot listen on {host}:{port}: {reason} (choose another --port)") from exc
    bound.setblocking(False)
    return bound

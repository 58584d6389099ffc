"""Creates the TCP sockets on which processes listen."""

import socket

from baton_serve.services.common.errors import ConfigurationError


def bind_tcp(host: str, port: int, *, shares_port: bool = False, listens: bool = True) -> socket.socket:
    """Return a socket that is bound to an address and listens; the caller closes it.

    Without `listens` the socket only reserves the port. With `shares_port` other processes of this user may bind it
    too. Raises `ConfigurationError`, which names the address, if it cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    # Without it a restart would fail for a minute, while old connections are in TIME_WAIT.
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

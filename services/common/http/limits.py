"""Limits of the HTTP server for its clients: bytes, seconds and connections.

The times have nginx's values, and nginx's names where it has one.
"""

import resource
from dataclasses import dataclass

_LEAST_CONNECTIONS = 16
"""Number of connections that is allowed even if the process may open very few files."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """The limits of one HTTP server."""

    max_head_bytes: int = 64 * 1024
    """Maximum size of the request line and the headers of one request."""
    head_timeout_s: float = 10.0
    """Longest time from the first byte of a head, or from the start of the connection, to the end of the head.

    It also limits a TLS handshake.
    """
    body_timeout_s: float = 30.0
    """Longest time between two reads of a body, and before the first one."""
    keep_alive_s: float = 75.0
    """Longest time from a response to the next request on the connection.

    It is longer than the time for which proxies keep idle connections (mostly 60 s): otherwise a proxy could send a
    request on a connection that is being closed here.
    """
    send_timeout_s: float = 60.0
    """Longest time for a client to receive the remaining data of a connection that is being closed."""
    lingering_time_s: float = 30.0
    """Longest time for which data that a client sends after its response is read and discarded.

    If the connection were closed with unread data, TCP would reset it, and the client would lose the response.
    """
    lingering_timeout_s: float = 5.0
    """Longest time between two reads of discarded data."""
    lingering_bytes: int = 64 * 1024 * 1024
    """Maximum size of discarded data."""
    max_connections: int = 8192
    """Maximum number of connections of one process; it is lower if the process may open fewer files."""
    max_connections_per_address: int = 0
    """Maximum number of connections of one client address; 0 means no limit."""


def affordable_connections(most: int) -> int:
    """Return `most`, or a lower number of connections if this process may open too few files.

    A quarter of the file descriptors is kept for everything else.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return most
    return min(most, max(_LEAST_CONNECTIONS, soft - soft // 4))

"""What an HTTP server gives its clients: bytes, seconds and connections. The times are nginx's, by the same names where
it has one."""

import resource
from dataclasses import dataclass

_LEAST_CONNECTIONS = 16


@dataclass(frozen=True, slots=True)
class HttpLimits:
    max_head_bytes: int = 64 * 1024
    """Of the request line and the headers of one request."""
    head_timeout_s: float = 10.0
    """From the first byte of a head, or from the connection's start, to the head's end; for a TLS handshake as well."""
    body_timeout_s: float = 30.0
    """Between two reads of a body, and before the first one."""
    keep_alive_s: float = 75.0
    """From an answer to the next request on its connection: longer than proxies keep theirs (mostly 60 s), which would
    otherwise send a request into a connection that is just closed."""
    send_timeout_s: float = 60.0
    """For a client to take the rest of what it was sent, once its connection is to be closed."""
    lingering_time_s: float = 30.0
    """For what a client still sends after its answer: it is read and discarded, since the client would otherwise lose
    the answer (TCP resets a connection that is closed with unread data)."""
    lingering_timeout_s: float = 5.0
    """Between two reads of that."""
    lingering_bytes: int = 64 * 1024 * 1024
    max_connections: int = 8192
    """Of one process; fewer where it may open fewer files."""
    max_connections_per_address: int = 0
    """Of one client address; 0: no limit."""


def affordable_connections(most: int) -> int:
    """`most`, or as many as this process has descriptors for: a quarter of them is kept for everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return most
    return min(most, max(_LEAST_CONNECTIONS, soft - soft // 4))

"""Free TCP ports for servers that tests and benchmarks start and restart. Needs only the standard library."""

import contextlib
import socket
from itertools import cycle
from random import SystemRandom

_PORTS = cycle(SystemRandom().sample(range(20000, 32000), 12000))
"""Candidates in random order, so that parallel runs rarely try the same port. They lie below the kernel's range of
ephemeral ports: an outgoing connection could take a port of that range after `free_port` has returned it."""


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nothing listens on. It is not reserved: bind it soon."""
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("unreachable")

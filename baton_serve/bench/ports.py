"""Ports for what a test or a benchmark starts and restarts. Needs nothing installed."""

import contextlib
import socket
from itertools import cycle
from random import SystemRandom

_PORTS = cycle(SystemRandom().sample(range(20000, 32000), 12000))
"""Below those that the kernel gives to connections, which could take one between `free_port` and its use."""


def free_port() -> int:
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("unreachable")

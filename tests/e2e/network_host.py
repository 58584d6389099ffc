"""A second host on one machine: a network namespace that one cable (a veth pair) connects with this one."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from baton_serve.services import cli

CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True)
class NetworkHost:
    """The namespace `name`. `own` is the address of this machine at the cable, which `cable` names."""

    name: str
    own: str
    cable: str

    def argv(self, *args: str) -> list[str]:
        """Arguments for the fork server of the tests: `baton ARGS` on that host."""
        return [__name__, self.name, *args]

    def unplug(self) -> None:
        """Cut the cable: from now on neither side hears anything of the other, not even that a connection ends."""
        _ip("link", "set", self.cable, "down")

    def plug_in(self) -> None:
        _ip("link", "set", self.cable, "up")


def lacks() -> str:
    """Return why there can be no second host here, or an empty text."""
    try:
        with network_host():
            return ""
    except (OSError, subprocess.CalledProcessError) as exc:
        return f"network namespaces cannot be made here: {exc}"


@contextmanager
def network_host() -> Iterator[NetworkHost]:
    """Make a second host, and remove it afterwards."""
    number = os.getpid() % 65536
    name, ours, theirs = f"baton-{number}", f"bt{number}a", f"bt{number}b"
    # Addresses for benchmarks of network devices (RFC 2544), so that they hide no network of this machine.
    network = f"198.18.{number // 256}"
    host = 4 * (number % 64)
    _ip("netns", "add", name)
    try:
        _ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name)
        _ip("addr", "add", f"{network}.{host + 1}/30", "dev", ours)
        _ip("link", "set", ours, "up")
        _ip("-n", name, "addr", "add", f"{network}.{host + 2}/30", "dev", theirs)
        _ip("-n", name, "link", "set", theirs, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        yield NetworkHost(name, f"{network}.{host + 1}", ours)
    finally:
        # The pair of interfaces disappears with the namespace.
        _ip("netns", "del", name)


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main(argv: Sequence[str]) -> None:
    """Run `baton` with `argv[1:]` in the namespace `argv[0]`. Processes and threads that it starts are there too."""
    with Path("/run/netns", argv[0]).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            sys.exit(f"cannot enter the namespace {argv[0]}: {os.strerror(ctypes.get_errno())}")
    cli.main(argv[1:])

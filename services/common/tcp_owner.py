"""Which user is at the other end of a TCP connection within this machine, by the kernel's table of connections.

TCP itself does not say; the table names the owner of each end that is on this machine (what identd answered from).
"""

import ipaddress
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED = "01"
"""A connection in any other state may have lost its owner, and is then shown as root's."""

Address = tuple[str, int]


def owners(client: Address, server: Address, tables: Iterable[Path] = TABLES) -> set[int]:
    """User ids of `client`'s ends of connections to the port of `server`. Usually one; empty: it is on another machine,
    it has closed, or there is no such table."""
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
    """Of `0100007F:1F90`: words of 32 bits in this machine's order, and the port."""
    digits, _, port = text.partition(":")
    words = [int(digits[at : at + 8], 16).to_bytes(4, "little") for at in range(0, len(digits), 8)]
    return _plain(ipaddress.ip_address(b"".join(words))), int(port, 16)


def _plain(address: "str | ipaddress.IPv4Address | ipaddress.IPv6Address") -> str:
    """IPv4 as such where it is written as IPv6."""
    found = ipaddress.ip_address(address) if isinstance(address, str) else address
    return str((isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped) or found)

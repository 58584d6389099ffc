"""Finds the user at the other end of a TCP connection within this machine, in the kernel's table of connections.

TCP itself does not identify users, but the table names the owner of each end that is on this machine.
"""

import ipaddress
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# One line per end of a connection: its own address, the peer's address, its state, and further on its user id.
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED = "01"
"""The only state that counts. In other states a connection may have lost its owner, and is then shown as root's."""

Address = tuple[str, int]
"""IP address and port."""


def owners(client: Address, server: Address, tables: Iterable[Path] = TABLES) -> set[int]:
    """Return the user ids that own `client`'s end of a connection to the port of `server`, usually one.

    The set is empty if the client is on another machine, has closed the connection, or if the tables are missing.
    """
    # Only the port of the server is compared: it may listen on several addresses.
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
    """Parse an address such as `0100007F:1F90`: words of 32 bits in the byte order of the machine, and the port."""
    digits, _, port = text.partition(":")
    words = [int(digits[at : at + 8], 16).to_bytes(4, "little") for at in range(0, len(digits), 8)]
    return _plain(ipaddress.ip_address(b"".join(words))), int(port, 16)


def _plain(address: "str | ipaddress.IPv4Address | ipaddress.IPv6Address") -> str:
    """Return an address as text. An IPv4 address that is mapped to IPv6 is returned as IPv4."""
    found = ipaddress.ip_address(address) if isinstance(address, str) else address
    return str((isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped) or found)

"""Which user is at the other end of a Unix socket, by what the kernel says of it. A name in the abstract namespace has
no permissions: any user of the machine can connect to it, or listen there once its owner has ended."""

import os
import socket
import struct
from typing import Protocol

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
ROOT = 0


class Connected(Protocol):
    """`socket.socket`, or what asyncio shows of one."""

    @property
    def family(self) -> int: ...
    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


def stranger(connection: Connected) -> int | None:
    """User id of the other end if it is neither this process's user nor root. None if it is, and for TCP, which does
    not say."""
    if connection.family != socket.AF_UNIX:
        return None
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(found)[1]
    return None if uid in (ROOT, os.geteuid()) else uid

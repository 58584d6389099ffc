"""Decides whether the process at the other end of a Unix socket belongs to the same user.

A name in the abstract namespace has no permissions: any user of the machine can connect to it, or listen there after
its owner has ended. So both ends check who their peer is.
"""

import os
import socket
import struct
from typing import Protocol

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
ROOT = 0
"""User id of root."""


class Connected(Protocol):
    """The methods of a connected socket that `stranger` calls: `socket.socket`, or asyncio's wrapper of one, has
    them."""

    @property
    def family(self) -> int: ...
    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


def stranger(connection: Connected) -> int | None:
    """Return the user id of the process at the other end of a local connection, if it is neither root nor this
    process's user; otherwise None.

    Return None for TCP too, which does not report the user.
    """
    if connection.family != socket.AF_UNIX:
        return None
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(found)[1]
    return None if uid in (ROOT, os.geteuid()) else uid

"""Frames the messages of a connection: a preamble, then each message behind its length."""

from collections.abc import Iterator
from struct import Struct

from baton_serve.contracts.wire import MAX_FRAME_BYTES

PREAMBLE = b"BATON/1\n"
"""The first bytes of both ends. A process of another protocol or version is noticed before its bytes are parsed."""
LENGTH = Struct(">I")
"""Length of a message in bytes."""
_TLS_HANDSHAKE = b"\x16\x03"
"""First bytes of a peer that uses TLS."""


class ProtocolError(Exception):
    """The other end of a connection does not follow Baton's protocol of messages. The text is a sentence
    for the log.
    """


def frame(message: bytes) -> bytes:
    """Return the bytes to send for a message: its length as a 4-byte number, then the message."""
    return LENGTH.pack(len(message)) + message


class FrameReader:
    """Divides the bytes that arrive on one connection into messages. `is_ready` is True once the peer's preamble, its
    first bytes, has arrived.
    """

    def __init__(self) -> None:
        self.is_ready = False
        self._parts: list[bytes] = []
        self._missing = 0
        """Number of bytes that the message in `_parts` still lacks.

        A long message is joined once when it is complete; joining it with each part would take quadratic time.
        """

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield each message that is complete with `data`, the next bytes of the connection. Raises `ProtocolError` if
        they are not of this protocol or announce a message that is too long.
        """
        if self._parts:
            data = self._assemble(data)
        start, end = 0 if self.is_ready else self._read_preamble(data), len(data)
        while self.is_ready and end - start >= LENGTH.size:
            body = start + LENGTH.size
            length: int = LENGTH.unpack_from(data, start)[0]
            # Checked before the message is complete, or a peer could make this process store any amount of data.
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"the peer announced a message of {length} bytes, the limit is {MAX_FRAME_BYTES}")
            stop = body + length
            if stop > end:
                self._missing = stop - end
                break
            start = stop
            yield data[body:stop]
        if start < end:
            self._parts.append(data[start:])

    def _assemble(self, data: bytes) -> bytes:
        """Add `data` to the stored bytes of an incomplete message. Return all of them joined once the message is
        complete, otherwise b"".
        """
        self._parts.append(data)
        self._missing -= len(data)
        if self._missing > 0:
            return b""
        joined = b"".join(self._parts)
        self._parts.clear()
        return joined

    def _read_preamble(self, data: bytes) -> int:
        """Check that `data` begins with the preamble and return the preamble's length, or 0 if it is not complete yet.
        Raises `ProtocolError` if these are other bytes.
        """
        if data.startswith(PREAMBLE):
            self.is_ready = True
            return len(PREAMBLE)
        if data.startswith(_TLS_HANDSHAKE):
            raise ProtocolError("the peer encrypts its messages and this process does not (--cluster-key-file)")
        if not PREAMBLE.startswith(data):
            raise ProtocolError("the peer is no Baton process of this version")
        return 0

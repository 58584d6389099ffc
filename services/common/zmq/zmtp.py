"""ZeroMQ's wire protocol as bytes, without I/O: ZMTP 3.0 (https://rfc.zeromq.org/spec/23/) with the NULL mechanism.

Messages of one frame go out; of messages that come the last frame is read.
"""

from collections.abc import Iterator

from baton_serve.contracts.wire import MAX_FRAME_BYTES

_MORE, _LONG, _COMMAND = 0x01, 0x02, 0x04
_MECHANISM = b"NULL".ljust(20, b"\0")
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + _MECHANISM + bytes(32)


class ZmtpError(Exception):
    """The other end speaks something else, or refuses this one."""


def frame_message(message: bytes) -> bytes:
    """As one frame, the last of its message."""
    if len(message) < 256:
        return bytes((0, len(message))) + message
    return b"\x02" + len(message).to_bytes(8, "big") + message


def command(body: bytes) -> bytes:
    return bytes((_COMMAND, len(body))) + body


def handshake(socket_type: bytes) -> bytes:
    """All that an end says before its messages; it need not wait for the other's part of it."""
    properties = ((b"Socket-Type", socket_type), (b"Identity", b""))
    said = [bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value for name, value in properties]
    return GREETING + command(b"\x05READY" + b"".join(said))


class ZmtpReader:
    """Bytes in, messages out. `is_ready` from the end of the handshake on."""

    def __init__(self) -> None:
        self.is_ready = False
        self.pong: bytes | None = None
        """What the last PING wants to be answered with; whoever sends it sets this to None again."""
        self._is_greeted = False
        self._parts: list[bytes] = []
        self._missing = 0
        """Of what `_parts` begins: a long frame is put together once, not with each of its parts."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The last frames of the messages that `data` completes. Raises `ZmtpError`."""
        if self._parts:
            data = self._assemble(data)
        start, end = 0 if self._is_greeted else self._greeting(data), len(data)
        while self._is_greeted and start < end:
            flags = data[start]
            body = start + (9 if flags & _LONG else 2)
            if body > end:
                break
            stop = body + int.from_bytes(data[start + 1 : body], "big")
            if stop - body > MAX_FRAME_BYTES:
                raise ZmtpError(f"a frame of {stop - body} bytes exceeds the limit of {MAX_FRAME_BYTES}")
            if stop > end:
                self._missing = stop - end
                break
            start = stop
            if flags & _COMMAND:
                self._on_command(data[body:stop])
            elif not self.is_ready:
                raise ZmtpError("a message came before the handshake's end")
            elif not flags & _MORE:
                yield data[body:stop]
        if start < end:
            self._parts.append(data[start:])

    def _assemble(self, data: bytes) -> bytes:
        """Empty as long as the frame that has begun is not whole."""
        self._parts.append(data)
        self._missing -= len(data)
        if self._missing > 0:
            return b""
        whole = b"".join(self._parts)
        self._parts.clear()
        return whole

    def _greeting(self, data: bytes) -> int:
        """Length of a whole greeting, else 0."""
        if len(data) < len(GREETING):
            return 0
        if data[0] != 0xFF or data[9] != 0x7F or data[10] < 3:
            raise ZmtpError("no ZMTP 3")
        if data[12:32] != _MECHANISM:
            raise ZmtpError(f"the other end wants {data[12:32].rstrip(bytes(1))!r}, not NULL")
        self._is_greeted = True
        return len(GREETING)

    def _on_command(self, body: bytes) -> None:
        if body.startswith(b"\x05READY"):
            self.is_ready = True
        elif body.startswith(b"\x05ERROR"):
            raise ZmtpError(f"refused: {body[7:]!r}")
        elif body.startswith(b"\x04PING"):  # then two bytes of a time, and a context of at most 16 to be sent back
            self.pong = command(b"\x04PONG" + body[7:23])

"""ZeroMQ's wire protocol without I/O: ZMTP 3.0 (https://rfc.zeromq.org/spec/23/) with the NULL mechanism.

Sent messages have one frame. Of received messages only the last frame is used.
"""

from collections.abc import Iterator

from baton_serve.contracts.wire import MAX_FRAME_BYTES

# Flags of a frame: more frames of its message follow; its length has 8 bytes and not 1; it is a command.
_MORE, _LONG, _COMMAND = 0x01, 0x02, 0x04
_MECHANISM = b"NULL".ljust(20, b"\0")
# Signature, version 3.0, mechanism, as-server flag (0) and padding: 64 bytes.
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + _MECHANISM + bytes(32)


class ZmtpError(Exception):
    """The peer does not follow this protocol, or it has refused the connection."""


def frame_message(message: bytes) -> bytes:
    """Return a message as one frame, the last one of its message."""
    if len(message) < 256:
        return bytes((0, len(message))) + message
    return b"\x02" + len(message).to_bytes(8, "big") + message


def command(body: bytes) -> bytes:
    """Return a command as one short frame. `body` has at most 255 bytes and begins with its name."""
    return bytes((_COMMAND, len(body))) + body


def handshake(socket_type: bytes) -> bytes:
    """Return what one end sends before its first message: the greeting and READY.

    It can be sent at once, because with the NULL mechanism it does not depend on the peer.
    """
    properties = ((b"Socket-Type", socket_type), (b"Identity", b""))
    encoded = [bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value for name, value in properties]
    return GREETING + command(b"\x05READY" + b"".join(encoded))


class ZmtpReader:
    """Parses the bytes of one connection into messages. `is_ready` is True once the peer's handshake is complete."""

    def __init__(self) -> None:
        self.is_ready = False
        self.pong: bytes | None = None
        """The answer to the last PING. The caller sends it and sets this to None again."""
        self._is_greeted = False
        self._parts: list[bytes] = []
        self._missing = 0
        """Number of bytes that the frame in `_parts` still lacks.

        A long frame is joined once when it is complete; joining it with each part would take quadratic time.
        """

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the last frame of each message that `data` completes. Raises `ZmtpError` for a wrong frame."""
        if self._parts:
            data = self._assemble(data)
        start, end = 0 if self._is_greeted else self._greeting(data), len(data)
        while self._is_greeted and start < end:
            flags = data[start]
            body = start + (9 if flags & _LONG else 2)
            if body > end:
                break
            stop = body + int.from_bytes(data[start + 1 : body], "big")
            # Checked before the frame is complete, or a peer could make this process store any amount of data.
            if stop - body > MAX_FRAME_BYTES:
                raise ZmtpError(f"a frame of {stop - body} bytes exceeds the limit of {MAX_FRAME_BYTES}")
            if stop > end:
                self._missing = stop - end
                break
            start = stop
            if flags & _COMMAND:
                self._on_command(data[body:stop])
            elif not self.is_ready:
                raise ZmtpError("the peer sent a message before the end of the handshake")
            elif not flags & _MORE:
                yield data[body:stop]
        if start < end:
            self._parts.append(data[start:])

    def _assemble(self, data: bytes) -> bytes:
        """Add `data` to the stored parts. Return them joined, or b"" while the frame is not complete."""
        self._parts.append(data)
        self._missing -= len(data)
        if self._missing > 0:
            return b""
        frame = b"".join(self._parts)
        self._parts.clear()
        return frame

    def _greeting(self, data: bytes) -> int:
        """Check the peer's greeting and return its length, or 0 if it is not complete. Raises `ZmtpError`."""
        if len(data) < len(GREETING):
            return 0
        if data[0] != 0xFF or data[9] != 0x7F or data[10] < 3:
            raise ZmtpError("the peer does not use ZMTP 3")
        if data[12:32] != _MECHANISM:
            raise ZmtpError(
                f"the peer uses the mechanism {data[12:32].rstrip(bytes(1))!r} and not NULL"
                " (CURVE: it has a --cluster-key-file)"
            )
        self._is_greeted = True
        return len(GREETING)

    def _on_command(self, body: bytes) -> None:
        if body.startswith(b"\x05READY"):
            self.is_ready = True
        elif body.startswith(b"\x05ERROR"):
            raise ZmtpError(f"the peer refuses the connection: {body[7:]!r}")
        elif body.startswith(b"\x04PING"):
            # Behind the name are 2 bytes with a time to live, and a context of at most 16 bytes, which PONG repeats.
            self.pong = command(b"\x04PONG" + body[7:23])

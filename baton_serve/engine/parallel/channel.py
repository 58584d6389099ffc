"""Frames over a pair of connected sockets between two processes of a host: length, then bytes. Every wait has an end.

The other process's end ends the stream, so its death is seen at once.
"""

import os
import socket
import struct
from typing import Generic, TypeVar

import msgspec

from baton_serve.engine.errors import EngineError

T = TypeVar("T")

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 256 << 20


class ChannelError(EngineError):
    """The other process is gone, is late, or sent what nobody expects."""


class Channel(Generic[T]):
    """`T` is what arrives. Owns the socket."""

    def __init__(self, connection: socket.socket, arriving: object, *, send_timeout_s: float) -> None:
        connection.settimeout(send_timeout_s)
        self._socket = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(arriving)
        self._send_timeout_s = send_timeout_s

    def send(self, frame: bytes) -> None:
        """What `encode` made: the same frame may go to several."""
        try:
            self._socket.sendall(frame)
        except OSError as exc:
            raise ChannelError(f"a rank takes no more commands: {exc}") from exc

    def encode(self, message: msgspec.Struct) -> bytes:
        body = self._encoder.encode(message)
        return LENGTH.pack(len(body)) + body

    def receive(self, timeout_s: float | None) -> T:
        """None: as long as the other process lives, whose death ends the wait."""
        try:
            self._socket.settimeout(timeout_s)
            (length,) = LENGTH.unpack(self._read(LENGTH.size))
            if length > MAX_FRAME_BYTES:
                raise ChannelError(f"a frame of {length} bytes")
            return self._decoder.decode(self._read(length))
        except TimeoutError as exc:
            raise ChannelError(f"a rank did not answer within {timeout_s:g} s") from exc
        except ConnectionError as exc:
            raise ChannelError("the other process has ended") from exc
        except (OSError, msgspec.DecodeError) as exc:
            raise ChannelError(f"a rank cannot be understood: {exc}") from exc
        finally:
            self._socket.settimeout(self._send_timeout_s)

    def send_descriptor(self, descriptor: int) -> None:
        socket.send_fds(self._socket, [b"\0"], [descriptor])

    def receive_descriptor(self) -> int:
        """The caller owns it."""
        _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        if len(descriptors) != 1:
            raise ChannelError("a descriptor did not arrive")
        os.set_inheritable(descriptors[0], False)
        return descriptors[0]

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            count = self._socket.recv_into(view[got:])
            if not count:
                raise ChannelError("the other process has ended")
            got += count
        return data

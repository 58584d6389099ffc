"""Sends frames between two processes of an engine over a pair of connected sockets: length, then bytes. Every wait has
a timeout or ends with the other process.

When the other process exits, its socket is closed, which is noticed immediately. On another host it may also fall
silent; then the kernel ends the connection (see `RemoteRanks`).
"""

import os
import socket
import struct
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec

from baton_serve.engine.errors import EngineError

T = TypeVar("T")

LENGTH = struct.Struct("<I")
"""Four bytes, little endian."""
MAX_FRAME_BYTES = 1 << 30
"""Largest frame in bytes: the recurrent states of a sequence are up to 300 MB. A larger length means that the stream is
broken."""


class ChannelError(EngineError):
    """The process at the other end of a `Channel` has exited, has not answered in time, or has sent something
    unexpected.
    """


class Channel(Generic[T]):
    """One end of a socket connection between rank 0 and another rank of an engine; `T` is the type of the messages that
    this end receives. Owns the socket.
    """

    def __init__(self, connection: socket.socket, arriving: object, *, send_timeout_s: float) -> None:
        connection.settimeout(send_timeout_s)
        self._socket = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(arriving)
        self._send_timeout_s = send_timeout_s
        self.num_sent = 0
        """Number of messages that were sent. Any thread may read it."""
        self.num_received = 0

    def send(self, frame: bytes) -> None:
        """Send one message as bytes that `encode` has returned, so that one encoding serves several channels. Raises
        `ChannelError` if the other process has exited or does not read.
        """
        try:
            self._socket.sendall(frame)
        except OSError as exc:
            raise ChannelError(f"cannot send a command to a rank: {exc}") from exc
        self.num_sent += 1

    def encode(self, message: msgspec.Struct) -> bytes:
        """Return a message as bytes for `send`: its length, then its msgpack encoding."""
        body = self._encoder.encode(message)
        return LENGTH.pack(len(body)) + body

    def receive(self, timeout_s: float | None) -> T:
        """Wait for the next message and return it. Wait at most `timeout_s` seconds; None waits until the other process
        ends. Raises `ChannelError` if no message comes or it cannot be decoded.
        """
        try:
            self._socket.settimeout(timeout_s)
            (length,) = LENGTH.unpack(self._read(LENGTH.size))
            # Do not allocate what a broken stream announces.
            if length > MAX_FRAME_BYTES:
                raise ChannelError(f"a frame of {length} bytes exceeds the limit of {MAX_FRAME_BYTES}")
            message = self._decoder.decode(self._read(length))
        except TimeoutError as exc:
            raise ChannelError(f"a rank did not answer within {timeout_s:g} s") from exc
        except ConnectionError as exc:
            raise ChannelError("the other process has ended") from exc
        except (OSError, msgspec.DecodeError) as exc:
            raise ChannelError(f"cannot decode a message of a rank: {exc}") from exc
        finally:
            # Sending needs its own limit again, since both directions share the socket's timeout.
            self._socket.settimeout(self._send_timeout_s)
        self.num_received += 1
        return message

    def send_descriptor(self, descriptor: int) -> None:
        """Send an open file descriptor to the other process. The caller keeps its own."""
        socket.send_fds(self._socket, [b"\0"], [descriptor])

    def receive_descriptor(self) -> int:
        """Return a file descriptor that the other process has sent by `send_descriptor`. The caller owns it and must
        close it. Raises `ChannelError` if none comes.
        """
        _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        if len(descriptors) != 1:
            raise ChannelError("the other process sent no file descriptor")
        # A child process must not inherit it, or the memory would live as long as the child.
        os.set_inheritable(descriptors[0], False)
        return descriptors[0]

    def close(self) -> None:
        """Close the socket, which ends the other side's wait."""
        # A thread that polls the socket keeps it open, so closing alone would not reach the other side.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def fileno(self) -> int:
        """Return the socket's descriptor, to be polled for the end of the connection; -1 if it is closed."""
        return self._socket.fileno()

    def _read(self, size: int) -> bytearray:
        """Return exactly `size` bytes of the stream. Raises `ChannelError` if the other process closes the connection
        before.
        """
        # Read into one buffer: `recv` returns less than asked for if the frame is large.
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            count = self._socket.recv_into(view[got:])
            if not count:
                raise ChannelError("the other process has ended")
            got += count
        return data

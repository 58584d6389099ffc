"""Encodes and decodes all messages (MessagePack), and checks fields and frame length. Decoding checks every field, and
frame length before allocation.
"""

from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Default maximum length of a frame, so that a peer cannot make this process allocate without bound."""

_encoder = msgspec.msgpack.Encoder()


class WireError(ValueError):
    """Reports a frame that is too long, is not MessagePack or does not have the expected type, or a message that cannot
    be encoded."""


def encode(message: msgspec.Struct) -> bytes:
    """Return a message as MessagePack bytes. Raises `WireError` for values that MessagePack cannot carry: integers
    beyond 64 bits, lone surrogates."""
    try:
        return _encoder.encode(message)
    except (OverflowError, RecursionError, TypeError, ValueError) as exc:
        raise WireError(f"{type(message).__name__} cannot be encoded: {exc}") from exc


class Decoder(Generic[T]):
    """Decodes MessagePack frames to one message type, often a union of tagged structs, and refuses all others. Write
    `Decoder[ToInstance](ToInstance)`: the type parameter gives the static type of the result, because a union is not a
    `type[T]`."""

    def __init__(self, expected: object, *, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(expected)
        self._max_bytes = max_bytes

    def decode(self, frame: bytes | memoryview) -> T:
        """Decode one MessagePack frame and check every field against the expected type.

        Raises `WireError` if the frame is longer than `max_bytes` or does not match.
        """
        if len(frame) > self._max_bytes:
            raise WireError(f"frame of {len(frame)} bytes exceeds the limit of {self._max_bytes} bytes")
        try:
            return self._decoder.decode(frame)
        # Deep nesting raises RecursionError, invalid text UnicodeDecodeError: input from a peer must not raise anything
        # else.
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise WireError(f"undecodable frame: {exc}") from exc

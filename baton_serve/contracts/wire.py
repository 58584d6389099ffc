"""The one codec: MessagePack through msgspec. Decoding checks every field; lengths are bounded before allocation."""

from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")

MAX_FRAME_BYTES = 64 * 1024 * 1024

_encoder = msgspec.msgpack.Encoder()


class WireError(ValueError):
    """A frame that is too long, not MessagePack, or not of the expected type; or a message that no frame can carry."""


def encode(message: msgspec.Struct) -> bytes:
    """Raises `WireError` for what MessagePack cannot carry: integers beyond 64 bits, lone surrogates."""
    try:
        return _encoder.encode(message)
    except (OverflowError, RecursionError, TypeError, ValueError) as exc:
        raise WireError(f"{type(message).__name__} cannot be encoded: {exc}") from exc


class Decoder(Generic[T]):
    """Decodes frames of one type (often a union of tagged structs) and refuses everything else.

    `Decoder[ToInstance](ToInstance)`: the parameter types the result, since a union is no `type[T]`.
    """

    def __init__(self, expected: object, *, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(expected)
        self._max_bytes = max_bytes

    def decode(self, frame: bytes | memoryview) -> T:
        """Raises `WireError`."""
        if len(frame) > self._max_bytes:
            raise WireError(f"frame of {len(frame)} bytes exceeds the limit of {self._max_bytes}")
        try:
            return self._decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise WireError(f"undecodable frame: {exc}") from exc

"""What a prefill instance tells the decode instance with the last block: the first token of each sequence.

Rides as the opaque payload of a transfer, so that decode starts without another message.
"""

import msgspec

from baton_serve.contracts.wire import Decoder, encode

MAX_PAYLOAD_BYTES = 256 * 1024


class FirstToken(msgspec.Struct, frozen=True, array_like=True):
    sequence: int
    token_id: int
    is_finished: bool
    """The sequence ended with this token: there is nothing to decode."""


class FirstTokens(msgspec.Struct, frozen=True):
    """`since_end_s` is the time from the end of the computation to the sending of this."""

    tokens: list[FirstToken]
    since_end_s: float


_decoder = Decoder[FirstTokens](FirstTokens, max_bytes=MAX_PAYLOAD_BYTES)


def encode_first_tokens(tokens: list[FirstToken], *, since_end_s: float) -> bytes:
    return encode(FirstTokens(tokens, since_end_s))


def decode_first_tokens(payload: bytes) -> FirstTokens:
    """Raises `contracts.wire.WireError`."""
    return _decoder.decode(payload)

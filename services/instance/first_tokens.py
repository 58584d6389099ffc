"""Encodes the first token of each sequence, which a prefill worker sends with the last block of a handoff.

It travels as the opaque payload of the transfer, so that decoding starts without another message.
"""

import msgspec

from baton_serve.contracts.wire import Decoder, encode

MAX_PAYLOAD_BYTES = 256 * 1024
"""Maximum size of the encoded tokens in bytes: a peer must not make this process allocate without bound."""


class FirstToken(msgspec.Struct, frozen=True, array_like=True):
    """The first generated token of one sequence, which the prefill instance has sampled."""

    sequence: int
    token_id: int
    is_finished: bool
    """Whether the sequence ended with this token, so that the decode instance does not start it."""


class FirstTokens(msgspec.Struct, frozen=True):
    """The data that travel behind the last block of a handoff, from the prefill to the decode instance: the first token
    of each sequence. `since_end_s` is the time in seconds from the end of the prompt's computation to the encoding of
    these data.
    """

    tokens: list[FirstToken]
    since_end_s: float


_decoder = Decoder[FirstTokens](FirstTokens, max_bytes=MAX_PAYLOAD_BYTES)


def encode_first_tokens(tokens: list[FirstToken], *, since_end_s: float) -> bytes:
    """Return the bytes that a prefill instance sends behind the last block of a handoff. `FirstTokens` describes the
    content.
    """
    return encode(FirstTokens(tokens, since_end_s))


def decode_first_tokens(payload: bytes) -> FirstTokens:
    """Return the content of `payload`, the bytes behind the last block of a handoff. Raises `contracts.wire.WireError`
    if they are too long or malformed.
    """
    return _decoder.decode(payload)

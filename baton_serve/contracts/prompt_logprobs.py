"""Encodes the logprobs of a prompt in pieces, so that a receiver can decode them without one long step.

Half a million logprobs take 0.6 s to decode. A decoder holds the interpreter's lock until it returns: other threads run
only between two pieces.
"""

from collections.abc import Sequence

import msgspec

from baton_serve.contracts.messages import EncodedLogprobs, TokenLogprobs
from baton_serve.contracts.wire import Decoder

_PIECE_LOGPROBS = 8192
"""Logprobs of one piece. It takes 10 ms to decode."""

Steps = list[TokenLogprobs | None]
_encoder = msgspec.msgpack.Encoder()
_decoder = Decoder[Steps](Steps)


def encode_logprobs(steps: Sequence[TokenLogprobs | None]) -> EncodedLogprobs:
    """Encode the logprobs of all tokens of a prompt for a message to the router. A token without logprobs, such as the
    first one, has None."""
    sizes = [0 if step is None else 1 + len(step.top) for step in steps]
    length = max(1, _PIECE_LOGPROBS // max([1, *sizes]))
    pieces = [_encoder.encode(steps[start : start + length]) for start in range(0, len(steps), length)]
    return EncodedLogprobs(num_logprobs=sum(sizes), pieces=pieces)


def decode_logprobs(encoded: EncodedLogprobs) -> Steps:
    """Return the logprobs of all tokens of a prompt from a message; None for a token without logprobs. Call it in a
    thread if there are many. Raises `contracts.wire.WireError` if they cannot be decoded."""
    steps: Steps = []
    for piece in encoded.pieces:
        steps += _decoder.decode(piece)
    return steps

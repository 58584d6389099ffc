"""Where images stand in a prompt: the one token that a chat template writes for each becomes as many as the image is to
the decoder. Pure."""

from collections.abc import Sequence
from itertools import repeat

import msgspec

from baton_serve.contracts.media import MediaSpan
from baton_serve.contracts.vision import VisionProfile
from baton_serve.services.router.protocol.image_limits import image_error


class TokenizedPrompt(msgspec.Struct, frozen=True):
    """Tokens, and the files of what some of them stand for, each once."""

    token_ids: list[int]
    media: Sequence[MediaSpan] = ()
    images: Sequence[bytes] = ()


def repeat_image_tokens(token_ids: Sequence[int], counts: Sequence[int], profile: VisionProfile) -> list[int]:
    """With so many tokens for each image. Raises `BadRequestError` unless the template has written a token for each,
    and no text has."""
    image_id, count = profile.image_token_id, token_ids.count(profile.image_token_id)
    if count != len(counts):
        raise image_error(
            f"{len(counts)} images were given, and the chat template has written {count} places for images: text must"
            " not contain the token that stands for one, and the template must write it for each"
        )
    found: list[int] = []
    lengths = iter(counts)
    for token_id in token_ids:
        found += repeat(image_id, next(lengths)) if token_id == image_id else (token_id,)
    return found


def media_spans(
    token_ids: Sequence[int], counts: Sequence[int], digests: Sequence[bytes], profile: VisionProfile
) -> list[MediaSpan]:
    """Of an expanded prompt."""
    spans: list[MediaSpan] = []
    at = 0
    for count, digest in zip(counts, digests, strict=True):
        at = token_ids.index(profile.image_token_id, at)
        spans.append(MediaSpan(at, count, digest))
        at += count
    return spans

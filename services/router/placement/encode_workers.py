"""Chooses the encode instances that encode the images, videos and audio of a prompt, and the files that need not be
sent. Pure.

A file goes to the instance that has its embeddings, or else to the one with the fewest images to encode. Files whose KV
is cached where the prompt is computed are not encoded at all, nor sent there.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import InstanceId
from baton_serve.contracts.media import MediaSpan

MAX_QUEUE_S = 5.0
"""Longest queue of an encode instance that gets more images, in seconds. Prompts give up waiting for embeddings after
10 s by default, so that a longer queue would cost that time and spare no work."""


class Encoder(msgspec.Struct, frozen=True, kw_only=True):
    """An encode instance as a given request sees it."""

    instance: InstanceId
    layout: KVLayout
    """Layout of its embeddings. Only instances with this `Candidate.embedding_layout` can use them."""
    queued_images: int
    """Images that wait there, with what this router has sent since the last load report."""
    queue_s: float = 0.0
    """Seconds until the images that wait there are encoded, at its measured speed."""
    held: frozenset[bytes] = frozenset()
    """Digests of the request's images whose embeddings are there, or will be soon."""


def assign_images(
    media: Sequence[MediaSpan],
    files: Sequence[Sequence[bytes]],
    encoders: Sequence[Encoder],
    layout: KVLayout | None,
    *,
    cached_tokens: int,
) -> Mapping[InstanceId, tuple[bytes, ...]]:
    """Return which instance encodes which spans, by digest. `files` has the digests of each file's spans, of which all
    or none are encoded. The first `cached_tokens` tokens need no embeddings.

    Files are left out, and so encoded with the prompt, if no instance computes embeddings of this layout, or if all
    are too busy.
    """
    fitting = [encoder for encoder in encoders if encoder.layout == layout]
    idle = [encoder for encoder in fitting if encoder.queue_s <= MAX_QUEUE_S]
    queued = {encoder.instance: encoder.queued_images for encoder in fitting}
    found: dict[InstanceId, list[bytes]] = {}
    needed = {span.digest for span in media if span.end > cached_tokens}
    for digests in files:
        if needed.isdisjoint(digests):
            continue
        holders = [encoder for encoder in fitting if encoder.held.issuperset(digests)]
        if not (holders or idle):
            continue
        # Ties go by id, so that equal inputs give equal placements.
        chosen = min(holders or idle, key=lambda one: (queued[one.instance], one.instance)).instance
        # Nobody waits for embeddings that are taken from the cache.
        queued[chosen] += 0 if holders else len(digests)
        found.setdefault(chosen, []).extend(digests)
    return {instance: tuple(digests) for instance, digests in found.items()}


class SentImages(NamedTuple):
    """The files that are sent with a prompt, and how many leading tokens the others lie within
    (`Work.num_unsent_tokens`)."""

    images: list[bytes]
    num_unsent_tokens: int = 0


def images_to_send(
    images: Sequence[bytes], files: Sequence[Sequence[bytes]], media: Sequence[MediaSpan], *, num_cached: int
) -> SentImages:
    """Return the files of a prompt that the instance needs which computes it and has the KV of its first `num_cached`
    tokens. `files` has the digests of each file's spans, none for a file that is always sent.
    """
    needed = {span.digest for span in media if span.end > num_cached}
    sent = [image for image, own in zip(images, files, strict=True) if not own or not needed.isdisjoint(own)]
    return SentImages(sent, num_cached) if len(sent) < len(images) else SentImages(sent)

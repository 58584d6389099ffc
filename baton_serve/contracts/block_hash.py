"""Names of blocks: chained 16-byte hashes, equal on every machine and in every process.

name(block) = sha256(name(previous block) + its token ids as little-endian uint32)[:16]. The first
block's parent is the root, which mixes everything that makes KV incompatible. Equal names mean
interchangeable bytes. A last block that is not full is named by the tokens it has; since the number
of hashed bytes differs, it can never equal a full block's name. Where tokens of a block stand for
an image, the images' hashes and places are mixed into the name that its own is made from: blocks
before an image have their names from the text alone, those from it on differ with the image.
"""

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256

from baton_serve.contracts.identity import BlockHash
from baton_serve.contracts.media import MediaSpan, within

BLOCK_HASH_BYTES = 16


def root_hash(
    *,
    fingerprint: str,
    kv_dtype: str,
    block_tokens: int,
    lora: str = "",
    cache_salt: str = "",
) -> BlockHash:
    """The parent of a sequence's first block.

    `fingerprint` identifies the weights. Every part is length-prefixed, so no two different inputs hash the same bytes.
    """
    parts = [fingerprint.encode(), kv_dtype.encode(), str(block_tokens).encode(), lora.encode()]
    parts.append(cache_salt.encode())
    digest = sha256(b"baton-root-1")
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return BlockHash(digest.digest()[:BLOCK_HASH_BYTES])


def hash_blocks(
    root: BlockHash,
    token_ids: Sequence[int],
    block_tokens: int,
    *,
    parent: BlockHash | None = None,
    media: Sequence[MediaSpan] = (),
    start: int = 0,
) -> list[BlockHash]:
    """Names of all blocks of `token_ids`, the last one included even when it is not full.

    With `parent`, `token_ids` continue after the block of that name instead of after the root: they begin at the
    prompt's token `start`, from which on `media` counts.
    """
    words = array("I", token_ids)
    if words.itemsize != 4:
        raise RuntimeError("this platform's unsigned int is not 4 bytes")
    if sys.byteorder == "big":
        words.byteswap()
    data = words.tobytes()
    name: bytes = root if parent is None else parent
    names: list[BlockHash] = []
    step = block_tokens * 4
    for at in range(0, len(data), step):
        if media:
            name = _with_media(name, media, start + at // 4, block_tokens)
        name = sha256(name + data[at : at + step]).digest()[:BLOCK_HASH_BYTES]
        names.append(BlockHash(name))
    return names


def _with_media(parent: bytes, media: Sequence[MediaSpan], start: int, block_tokens: int) -> bytes:
    """What stands for `parent` where the block of tokens from `start` on shows images."""
    shown = within(media, start, start + block_tokens)
    if not shown:
        return parent
    digest = sha256(b"baton-media-1" + parent)
    for span in shown:
        digest.update(span.digest + (span.start - start).to_bytes(8, "little", signed=True))
    return digest.digest()[:BLOCK_HASH_BYTES]

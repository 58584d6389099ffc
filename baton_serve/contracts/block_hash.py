"""Computes block hashes (prefix caching): chained, with salt, LoRA adapter and images in them.

  hash(block) = sha256(hash(previous block) + token ids as little-endian uint32)[:16]

The parent of the first block is the root hash, which covers everything that makes KV incompatible. Blocks with equal
hashes have interchangeable bytes. The hash of a partly filled last block covers the tokens that it has; it never equals
the hash of a full block, because the number of hashed bytes differs. If tokens of a block stand for an image, the
image's hash and position are mixed into the parent's hash first: blocks before an image depend on the text only, later
ones also on the image.
"""

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256
from struct import Struct

from baton_serve.contracts.identity import BlockHash
from baton_serve.contracts.media import MediaSpan, end_of

_OFFSET = Struct("<q")
BLOCK_HASH_BYTES = 16
"""Length of a block hash. 16 bytes make accidental collisions practically impossible."""


def root_hash(
    *,
    fingerprint: str,
    kv_dtype: str,
    block_tokens: int,
    lora: str = "",
    cache_salt: str = "",
) -> BlockHash:
    """Return the hash that precedes the hash of a prompt's first block. It contains everything but tokens and images on
    which the KV depends, so that only equal KV has equal block hashes.

    `fingerprint` identifies the weights, and `lora` those of the LoRA adapter. With a `cache_salt` only requests that
    have the same one share blocks. Every argument is length-prefixed, so that no two different inputs hash the same
    bytes.
    """
    parts = [fingerprint.encode(), kv_dtype.encode(), str(block_tokens).encode(), lora.encode()]
    parts.append(cache_salt.encode())
    digest = sha256(b"baton-root-1")
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return BlockHash(digest.digest()[:BLOCK_HASH_BYTES])


def prompt_root(root: BlockHash, token_ids: Sequence[int], media: Sequence[MediaSpan]) -> BlockHash:
    """Return the root hash for a prompt whose tokens attend to each other in both directions: only requests with the
    same prompt and images share blocks, since the KV of its first token depends on its last one.

    `token_ids` and `media` are those of the prompt, without tokens that were generated after it. `root` is that of
    `root_hash`.
    """
    digest = sha256(b"baton-prompt-1" + root + len(token_ids).to_bytes(8, "little") + _words(token_ids))
    for span in media:
        digest.update(span.start.to_bytes(8, "little") + span.length.to_bytes(8, "little") + span.digest)
    return BlockHash(digest.digest()[:BLOCK_HASH_BYTES])


def checkpoint_hashes(block_hash: BlockHash, count: int) -> list[BlockHash]:
    """Return the hashes of the `count` blocks that hold the recurrent states after the last token of the block with
    hash `block_hash`, which may be partly filled.

    No block of KV has one of these hashes.
    """
    return [checkpoint_hash(block_hash, number) for number in range(count)]


def checkpoint_hash(block_hash: BlockHash, number: int) -> BlockHash:
    """Return the hash of block number `number` among the blocks that hold the recurrent states after the block with
    hash `block_hash`."""
    return BlockHash(sha256(block_hash + b"recurrent state" + number.to_bytes(4, "little")).digest()[:BLOCK_HASH_BYTES])


def window_hashes(block_hash: BlockHash, num_groups: int) -> list[BlockHash]:
    """Return the hashes of the blocks that hold the same tokens as the block `block_hash` for each of `num_groups`
    groups of layers with a sliding window.

    `block_hash` names the block of the layers with full attention. No other block has one of these hashes.
    """
    return [
        BlockHash(sha256(block_hash + b"sliding window" + number.to_bytes(4, "little")).digest()[:BLOCK_HASH_BYTES])
        for number in range(num_groups)
    ]


def cross_hashes(root: BlockHash, digest: bytes, count: int) -> list[BlockHash]:
    """Return the hashes of the `count` blocks that hold the cross-attention KV of a source, such as a window of audio.
    `digest` identifies the source.

    They depend on `root` (see `root_hash`) and `digest` only, so that all prompts with that source share the blocks.
    """
    return _numbered(root + b"cross attention" + digest, count)


def embedding_hashes(root: BlockHash, digest: bytes, count: int) -> list[BlockHash]:
    """Return the hashes of the first `count` blocks that hold the embeddings of the image with this digest.

    `root` is that of `contracts.block_layout.embedding_layout`, whose fingerprint covers weights and image processor.
    No block of KV has one of these hashes.
    """
    return _numbered(root + b"image embeddings" + digest, count)


def _numbered(content: bytes, count: int) -> list[BlockHash]:
    """Return the hashes of `count` blocks that hold one content in order."""
    return [
        BlockHash(sha256(content + number.to_bytes(4, "little")).digest()[:BLOCK_HASH_BYTES]) for number in range(count)
    ]


def hash_blocks(
    root: BlockHash,
    token_ids: Sequence[int],
    block_tokens: int,
    *,
    parent: BlockHash | None = None,
    media: Sequence[MediaSpan] = (),
    start: int = 0,
) -> list[BlockHash]:
    """Return the chained hashes of all blocks of `token_ids`, including the last block if it is only partly filled.

    The tokens follow the hash `root`, at the start of a prompt. With `parent` they follow the block with that hash
    instead, and begin at token `start` of the prompt. `media` lists the prompt's images; its positions count from the
    start of the prompt.
    """
    data = _words(token_ids)
    block_hash: bytes = root if parent is None else parent
    hashes: list[BlockHash] = []
    step = block_tokens * 4
    mixed = _media_by_block(media, start, -(-len(data) // step), block_tokens)
    for number, at in enumerate(range(0, len(data), step)):
        if number in mixed:
            block_hash = sha256(b"baton-media-1" + block_hash + mixed[number]).digest()[:BLOCK_HASH_BYTES]
        block_hash = sha256(block_hash + data[at : at + step]).digest()[:BLOCK_HASH_BYTES]
        hashes.append(BlockHash(block_hash))
    return hashes


def _words(token_ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian uint32."""
    # An array converts all ids by one call: hashing a long prompt is on the way to its first token.
    words = array("I", token_ids)
    if words.itemsize != 4:
        raise RuntimeError("this platform's unsigned int is not 4 bytes")
    # Hashes must be equal on every machine.
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _media_by_block(media: Sequence[MediaSpan], start: int, num_blocks: int, block_tokens: int) -> dict[int, bytes]:
    """Return what the images add to the hashes of `num_blocks` blocks, of which the first begins at token `start`: by
    the number of the block, the digest and the relative place of each image that has tokens in it.
    """
    found: dict[int, bytes] = {}
    # A block of the answer, whose images all lie before it, is hashed in each few steps of a sequence.
    if not media or end_of(media) <= start:
        return found
    for span in media:
        begin = span.start - start
        first, end = max(0, begin // block_tokens), min(num_blocks, -(-(begin + span.length) // block_tokens))
        for number in range(first, end):
            found[number] = found.get(number, b"") + span.digest + _OFFSET.pack(begin - number * block_tokens)
    return found

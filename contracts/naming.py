"""Names of blocks: chained 16-byte hashes, equal on every machine and in every process.

name(block) = sha256(name(previous block) + its token ids as little-endian uint32)[:16]. The first
block's parent is the root, which mixes everything that makes KV incompatible. Equal names mean
interchangeable bytes. A last block that is not full is named by the tokens it has; since the number
of hashed bytes differs, it can never equal a full block's name.
"""

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256

from contracts.identity import BlockName

NAME_BYTES = 16


def root_name(
    *,
    fingerprint: str,
    kv_dtype: str,
    block_tokens: int,
    lora: str = "",
    media: Sequence[bytes] = (),
    cache_salt: str = "",
) -> BlockName:
    """The parent of a sequence's first block.

    `fingerprint` identifies the weights, `media` are content hashes of images or audio in prompt order.
    Every part is length-prefixed, so no two different inputs hash the same bytes.
    """
    parts = [fingerprint.encode(), kv_dtype.encode(), str(block_tokens).encode(), lora.encode()]
    parts += [cache_salt.encode(), *media]
    digest = sha256(b"baton-root-1")
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return BlockName(digest.digest()[:NAME_BYTES])


def block_names(
    root: BlockName, token_ids: Sequence[int], block_tokens: int, *, parent: BlockName | None = None
) -> list[BlockName]:
    """Names of all blocks of `token_ids`, the last one included even when it is not full.

    With `parent`, `token_ids` continue after the block of that name instead of after the root.
    """
    words = array("I", token_ids)
    if words.itemsize != 4:
        raise RuntimeError("this platform's unsigned int is not 4 bytes")
    if sys.byteorder == "big":
        words.byteswap()
    data = words.tobytes()
    name: bytes = root if parent is None else parent
    names: list[BlockName] = []
    step = block_tokens * 4
    for start in range(0, len(data), step):
        name = sha256(name + data[start : start + step]).digest()[:NAME_BYTES]
        names.append(BlockName(name))
    return names

"""Block hashes of prompts with images: the definition, and the same hashes for a prompt that is hashed in parts."""

from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from baton_serve.contracts.block_hash import hash_blocks
from baton_serve.contracts.identity import BlockHash
from baton_serve.contracts.media import MediaSpan

ROOT = BlockHash(b"root" * 4)


def defined(tokens: list[int], size: int, media: list[MediaSpan]) -> list[bytes]:
    """Return the chained hashes of the blocks of a prompt, block by block as the definition has them."""
    found: list[bytes] = []
    parent: bytes = ROOT
    for start in range(0, len(tokens), size):
        seen = [span for span in media if span.start < start + size and start < span.end]
        if seen:
            mixed = b"".join(one.digest + (one.start - start).to_bytes(8, "little", signed=True) for one in seen)
            parent = sha256(b"baton-media-1" + parent + mixed).digest()[:16]
        block = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + size])
        parent = sha256(parent + block).digest()[:16]
        found.append(parent)
    return found


@given(
    pieces=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20)), max_size=6),
    rest=st.integers(0, 30),
    size=st.sampled_from([1, 4, 7, 16]),
    cut=st.integers(0, 8),
)
def test_hashes_with_images_are_the_defined_ones_in_one_part_or_two(
    pieces: list[tuple[int, int]], rest: int, size: int, cut: int
) -> None:
    media: list[MediaSpan] = []
    at = 0
    for number, (text, length) in enumerate(pieces):
        media.append(MediaSpan(at + text, length, bytes([number]) * 32))
        at = media[-1].end
    tokens = list(range(at + rest))
    wanted = defined(tokens, size, media)
    assert hash_blocks(ROOT, tokens, size, media=media) == wanted
    first = min(cut, len(tokens) // size)
    later = hash_blocks(
        ROOT,
        tokens[first * size :],
        size,
        parent=BlockHash(wanted[first - 1]) if first else None,
        media=media,
        start=first * size,
    )
    assert later == wanted[first:]

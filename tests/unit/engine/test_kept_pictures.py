"""Decoded files are kept for prompts that have them again: by tenant, within a limit, and never if they are broken."""

from collections.abc import Iterable

import pytest
import torch

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import BlockHash
from baton_serve.contracts.media import digest_of
from baton_serve.engine.errors import RequestError
from baton_serve.engine.model.vision.decoded_media import KeptPictures
from baton_serve.engine.model.vision.image_types import DecodedImage

OURS, THEIRS = BlockHash(b"ours"), BlockHash(b"theirs")


class Reader:
    """Decodes a file to 40 bytes, and keeps which files it was given."""

    embedding_layout: KVLayout | None = None

    def __init__(self) -> None:
        self.files: list[bytes] = []

    def read(self, images: Iterable[bytes]) -> dict[bytes, DecodedImage]:
        files = list(images)
        self.files += files
        if b"broken" in files:
            raise RequestError("invalid", "broken")
        return {digest_of(file): DecodedImage({"pixel_values": torch.zeros(10)}, 1, 1) for file in files}


def test_a_file_is_decoded_once_for_each_tenant() -> None:
    reader = Reader()
    kept = KeptPictures(reader)
    first = kept.read(OURS, [b"a", b"b", b"a"])
    assert kept.read(OURS, [b"b", b"a"]).keys() == first.keys() == {digest_of(b"a"), digest_of(b"b")}
    assert reader.files == [b"a", b"b"]
    # Another tenant must not learn from the time of an answer that the file was here.
    kept.read(THEIRS, [b"a"])
    assert reader.files == [b"a", b"b", b"a"]


def test_the_least_recently_used_files_are_dropped_beyond_the_limit() -> None:
    reader = Reader()
    kept = KeptPictures(reader, max_bytes=80)
    for file in (b"a", b"b", b"a", b"c", b"a", b"b"):
        kept.read(OURS, [file])
    assert reader.files == [b"a", b"b", b"c", b"b"]


def test_a_broken_file_fails_every_time() -> None:
    reader = Reader()
    kept = KeptPictures(reader)
    for _ in range(2):
        with pytest.raises(RequestError, match="broken"):
            kept.read(OURS, [b"a", b"broken"])
    assert reader.files == [b"a", b"broken", b"broken"]

"""The library and the plain fallback copy the same bytes and find the same checksums, for any processor."""

import mmap
import random
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from baton_serve.kvtransfer.block_memory import address_of
from baton_serve.kvtransfer.native.copyhash import SOURCE, CopyHash, NativeCopyHash, PlainCopyHash
from baton_serve.kvtransfer.native.loader import FLAGS, LibraryUnavailableError, load_library

SIZES = [64, 240, 4096, 4096 + 64, 5120, 5120 - 64, 65536, 65537, 128 * 1024, 300 * 1024 + 192, 1 << 20]
MACHINES = ["native", "x86-64", "x86-64-v3", "x86-64-v4"]


@pytest.fixture(params=["plain", *MACHINES], scope="module")
def copies(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CopyHash:
    if request.param == "plain":
        return PlainCopyHash()
    words = Path("/proc/cpuinfo").read_text().split()
    needed = {"native": [], "x86-64": ["sse2"], "x86-64-v3": ["avx2"], "x86-64-v4": ["avx512f"]}[request.param]
    if any(word not in words for word in needed):
        pytest.skip(f"this processor is no {request.param}")
    flags = [flag.replace("native", request.param) for flag in FLAGS]
    return NativeCopyHash(load_library(SOURCE, cache=tmp_path_factory.mktemp("library"), flags=flags))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shift", [0, 8])
def test_what_is_copied_is_what_is_hashed(copies: CopyHash, size: int, shift: int) -> None:
    source, target = mmap.mmap(-1, 2 * size + 128), mmap.mmap(-1, 2 * size + 128)
    source.write(random.Random(size).randbytes(2 * size + 128))
    end, start = address_of(target) + shift, address_of(source) + 3
    found = copies.copy([end + size, end], [start, start + size], size)  # two, the second before the first
    assert target[shift : shift + 2 * size] == source[3 + size : 3 + 2 * size] + source[3 : 3 + size]
    assert not any(target[:shift] + target[shift + 2 * size :])
    assert found == [xxh3_64_intdigest(source[at : at + size]) for at in (3, 3 + size)]
    assert copies.checksums([start, start + size], size) == found
    target[:] = bytes(len(target))
    copies.move([end + size, end], [start, start + size], size)
    assert target[shift : shift + 2 * size] == source[3 + size : 3 + 2 * size] + source[3 : 3 + size]
    assert not any(target[:shift] + target[shift + 2 * size :])


def test_a_changed_byte_changes_the_checksum(copies: CopyHash) -> None:
    block = bytearray(random.Random(1).randbytes(8192))
    sums = set(copies.checksums([address_of(block)], len(block)))
    for place in (0, 1023, 1024, 4097, 8127, 8191):
        block[place] ^= 1
        sums |= set(copies.checksums([address_of(block)], len(block)))
    assert len(sums) == 7


def test_a_source_that_cannot_be_compiled_says_why(tmp_path: Path) -> None:
    source = tmp_path / "wrong.cpp"
    source.write_text("this is no program")
    with pytest.raises(LibraryUnavailableError, match=r"failed: .*wrong\.cpp"):
        load_library(source, cache=tmp_path)
    assert not list(tmp_path.glob("*.so"))

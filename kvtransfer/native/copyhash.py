"""Copy bytes and compute their xxh3_64 in one pass, with a C++ library if it can be built, otherwise with memmove and
xxhash.

Both give the same checksums, so one end of a transfer may have the library and the other not.
"""

import ctypes
import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from xxhash import xxh3_64, xxh3_64_intdigest

from baton_serve.kvtransfer.block_memory import copy_bytes, view_at
from baton_serve.kvtransfer.native.loader import LibraryUnavailableError, load_library

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("copyhash.cpp")
STRIPE_BYTES = 64
"""Unit of XXH3 in bytes. The library handles only sizes that are a multiple of it."""
MIN_NATIVE_BYTES = 4096
"""Size in bytes from which the library is used. XXH3 has other rules up to 240 bytes, and a few bytes are not worth the
call.
"""
MIN_STREAMING_STORE_BYTES = 128 * 1024
"""Size in bytes from which copies bypass the cache, so that they do not evict what the engine works with."""
CHUNK_BYTES = 256 * 1024
"""Size of the chunks that are copied and then hashed, in bytes: one fits a core's L2 cache together with its source."""


class CopyHash(Protocol):
    """Copies blocks in host memory and computes their xxh3_64 checksums. Each block is given by the address of its
    first byte and has `size` bytes. Other Python threads run meanwhile, so the caller must keep the memory alive.
    """

    def checksums(self, blocks: Sequence[int], size: int) -> list[int]:
        """Return the xxh3_64 checksum of each block. `blocks` are the addresses of their first bytes, and `size` is the
        size of each in bytes.
        """
        ...

    def copy(self, destinations: Sequence[int], sources: Sequence[int], size: int) -> list[int]:
        """Copy each block of `size` bytes from its address in `sources` to the address at the same position in
        `destinations`. Return the xxh3_64 checksum of each copied block.
        """
        ...

    def move(self, destinations: Sequence[int], sources: Sequence[int], size: int) -> None:
        """Copy each block of `size` bytes from its address in `sources` to the address at the same position in
        `destinations`, without a checksum. The sources stay as they are.
        """
        ...


class PlainCopyHash:
    """Implements `CopyHash` without C++: copies in chunks, and hashes each chunk at its destination while it is still
    in the CPU cache.
    """

    def checksums(self, blocks: Sequence[int], size: int) -> list[int]:
        return [xxh3_64_intdigest(view_at(block, size)) for block in blocks]

    def copy(self, destinations: Sequence[int], sources: Sequence[int], size: int) -> list[int]:
        return [_copied(end, start, size) for end, start in zip(destinations, sources, strict=True)]

    def move(self, destinations: Sequence[int], sources: Sequence[int], size: int) -> None:
        for end, start in zip(destinations, sources, strict=True):
            copy_bytes(end, start, size)


class NativeCopyHash:
    """Implements `CopyHash` with the C++ code of `copyhash.cpp`, which loads and stores each byte once. Large copies
    bypass the CPU cache.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        array = ctypes.POINTER(ctypes.c_uint64)
        self._hash, self._copy = library.baton_hash, library.baton_copy_and_hash
        self._hash.restype = self._copy.restype = None
        self._hash.argtypes = [array, array, ctypes.c_size_t, ctypes.c_size_t]
        self._move = library.baton_copy_past_the_cache
        self._move.restype = None
        self._move.argtypes = [array, array, ctypes.c_size_t, ctypes.c_size_t]
        self._copy.argtypes = [array, array, array, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
        self._plain = PlainCopyHash()

    def checksums(self, blocks: Sequence[int], size: int) -> list[int]:
        if size < MIN_NATIVE_BYTES or size % STRIPE_BYTES:
            return self._plain.checksums(blocks, size)
        sums = _words(len(blocks))
        self._hash(sums, _words(blocks), len(blocks), size)
        return sums[:]

    def copy(self, destinations: Sequence[int], sources: Sequence[int], size: int) -> list[int]:
        if size < MIN_NATIVE_BYTES or size % STRIPE_BYTES:
            return self._plain.copy(destinations, sources, size)
        sums = _words(len(sources))
        self._copy(sums, _words(destinations), _words(sources), len(sources), size, size >= MIN_STREAMING_STORE_BYTES)
        return sums[:]

    def move(self, destinations: Sequence[int], sources: Sequence[int], size: int) -> None:
        if size < MIN_STREAMING_STORE_BYTES or size % STRIPE_BYTES:
            self._plain.move(destinations, sources, size)
        elif destinations:
            self._move(_words(destinations), _words(sources), len(destinations), size)


@functools.cache
def copy_hash() -> CopyHash:
    """Return the fastest implementation of `CopyHash` that works on this machine. The first call may compile the C++
    library for seconds, so nodes call it when they start.
    """
    try:
        return NativeCopyHash(load_library(SOURCE))
    except LibraryUnavailableError as error:
        logger.warning(
            "KV blocks are copied and hashed in two passes, which is slower: %s. Install g++ to avoid it", error
        )
        return PlainCopyHash()


def _words(values: Sequence[int] | int) -> "ctypes.Array[ctypes.c_uint64]":
    """Return `values` as a C array of 64-bit numbers; if it is a single number, return an array of that many zeros. For
    few numbers this is quicker than numpy.
    """
    return (ctypes.c_uint64 * values)() if isinstance(values, int) else (ctypes.c_uint64 * len(values))(*values)


def _copied(destination: int, source: int, size: int) -> int:
    landed = view_at(destination, size)
    if size <= CHUNK_BYTES:
        copy_bytes(destination, source, size)
        return xxh3_64_intdigest(landed)
    digest = xxh3_64()
    for offset in range(0, size, CHUNK_BYTES):
        step = min(CHUNK_BYTES, size - offset)
        copy_bytes(destination + offset, source + offset, step)
        digest.update(landed[offset : offset + step])
    return digest.intdigest()

"""Vectors as they come from instances, and the little arithmetic that the router does on them."""

import asyncio
import sys
from array import array
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from operator import mul
from typing import Literal, TypeVar

import msgspec

T = TypeVar("T")

_TURN_BYTES = 64 * 1024
"""Of float32. Each takes 0.1 to 0.2 us to write, or in a cosine."""


@dataclass(frozen=True, slots=True)
class Vector:
    """`data` are little-endian float32 numbers, row by row."""

    shape: Sequence[int]
    data: bytes

    def values(self) -> "array[float]":
        """All of them, row after row, in an eighth of the memory of `numbers`."""
        values = array("f", self.data)
        if sys.byteorder == "big":
            values.byteswap()
        return values

    def numbers(self) -> list[float]:
        """All of them, row after row."""
        return self.values().tolist()

    def rows(self) -> "list[Vector]":
        """Of a matrix."""
        width = 4 * self.shape[1]
        return [Vector(self.shape[1:], self.data[at : at + width]) for at in range(0, len(self.data), width)]

    def written(self, encoding: Literal["float", "base64"]) -> bytes:
        """JSON of a vector, or of anything as base64."""
        return msgspec.json.encode(b64encode(self.data).decode("ascii") if encoding == "base64" else self.numbers())


async def written(vectors: Sequence[Vector], encoding: Literal["float", "base64"]) -> list[msgspec.Raw]:
    """As JSON. A request may have thousands, each with thousands of numbers: other requests have turns between them."""
    texts: list[msgspec.Raw] = []
    async for vector in in_turns(vectors, lambda vector: len(vector.data)):
        if encoding == "float" and len(vector.shape) == 2:
            rows = [row.written(encoding) async for row in in_turns(vector.rows(), lambda row: len(row.data))]
            texts.append(msgspec.Raw(b"[" + b",".join(rows) + b"]"))
        else:
            texts.append(msgspec.Raw(vector.written(encoding)))
    return texts


async def in_turns(items: Sequence[T], size: Callable[[T], int]) -> AsyncIterator[T]:
    """All of them, with a turn of the event loop after each `_TURN_BYTES` of what `size` says of them."""
    done = 0
    for item in items:
        yield item
        done += size(item)
        if done >= _TURN_BYTES:
            done = 0
            await asyncio.sleep(0)


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """0 where one of them is all zeros."""
    lengths = sqrt(sum(map(mul, first, first)) * sum(map(mul, second, second)))
    return sum(map(mul, first, second)) / lengths if lengths else 0.0

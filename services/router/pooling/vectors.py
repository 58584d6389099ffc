"""Vectors as they come from instances, and the little arithmetic that the router does on them."""

import sys
from array import array
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from operator import mul
from typing import Literal


@dataclass(frozen=True, slots=True)
class Vector:
    """`data` are little-endian float32 numbers, row by row."""

    shape: Sequence[int]
    data: bytes

    def numbers(self) -> list[float]:
        """All of them, row after row."""
        values = array("f", self.data)
        if sys.byteorder == "big":
            values.byteswap()
        return values.tolist()

    def encoded(self, encoding: Literal["float", "base64"]) -> "list[float] | list[list[float]] | str":
        if encoding == "base64":
            return b64encode(self.data).decode("ascii")
        numbers = self.numbers()
        if len(self.shape) == 1:
            return numbers
        width = self.shape[1]
        return [numbers[start : start + width] for start in range(0, len(numbers), width)]


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """0 where one of them is all zeros."""
    lengths = sqrt(sum(map(mul, first, first)) * sum(map(mul, second, second)))
    return sum(map(mul, first, second)) / lengths if lengths else 0.0

"""Interprets Triton's kernels quickly in each test of this folder."""

from collections.abc import Iterator

import pytest

from tests.quick_triton import quick_interpreter


@pytest.fixture(scope="package", autouse=True)
def quick_kernels() -> Iterator[None]:
    with quick_interpreter():
        yield

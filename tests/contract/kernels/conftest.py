"""All tests of this folder interpret Triton's kernels quickly."""

from collections.abc import Iterator

import pytest

from tests.quick_triton import quick_interpreter


@pytest.fixture(scope="package", autouse=True)
def quick_kernels() -> Iterator[None]:
    with quick_interpreter():
        yield

"""Quick: fewer examples of each property than elsewhere, and garbage is collected between files."""

import gc
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("unit", max_examples=25, deadline=None)
settings.load_profile("unit")


@pytest.fixture(scope="module", autouse=True)
def without_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()
    gc.collect(1)

"""Quick: fewer examples of each property than elsewhere, and nobody looks for garbage."""

import gc
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("unit", max_examples=25, deadline=None)
settings.load_profile("unit")


@pytest.fixture(scope="package", autouse=True)
def without_collections() -> Iterator[None]:
    """What these tests leave behind is little; looking for it would take a tenth of their time."""
    gc.disable()
    yield
    gc.enable()

"""Quick: fewer examples of each property than elsewhere, the same in each run, and nobody looks for garbage.

Other examples, and more: BATON_TEST_EXAMPLES=1000 pytest tests/unit
"""

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("unit", max_examples=25, deadline=None, derandomize=True)
settings.register_profile("search", max_examples=int(os.environ.get("BATON_TEST_EXAMPLES", "100")), deadline=None)
settings.load_profile("search" if "BATON_TEST_EXAMPLES" in os.environ else "unit")


@pytest.fixture(scope="package", autouse=True)
def without_collections() -> Iterator[None]:
    """Disable garbage collection: these tests leave little behind, and collections would take a tenth of their time."""
    gc.disable()
    yield
    gc.enable()

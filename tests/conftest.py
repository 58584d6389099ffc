"""For every test: Triton kernels run in Triton's interpreter, on the CPU, and what was imported is never collected.

The first must be said before anything imports triton (transformers does). To test on a device: `TRITON_INTERPRET=0
pytest …`. The second: a full collection looks at the million objects that torch, transformers and pydantic leave.
"""

import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")
# Baton's children ignore their working directory (`-P`): they find this checkout also where another one is installed.
ROOT = str(Path(__file__).resolve().parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Tests run with the collector on, over what they make themselves."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()

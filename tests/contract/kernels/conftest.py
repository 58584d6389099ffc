"""Triton's interpreter without two things that it does over and over, a third of the time of these tests."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from triton import language as tl
from triton.runtime import interpreter


@pytest.fixture(scope="package", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """A call of one kernel's function by another patches `triton.language` as the launch has done already; and the
    table from Triton's types to numpy's is made for each look into it."""
    patch_lang, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    look_up = interpreter._get_np_dtype
    looked_up = cache(look_up)
    patched: set[frozenset[bool]] = set()

    def patch_lang_once(fn: Any) -> Any:
        seen = frozenset(value is tl for value in fn.__globals__.values() if value is tl or value is tl.core)
        if seen in patched:
            return None
        patched.add(seen)
        return patch_lang(fn)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    def np_dtype(of: Any) -> Any:
        scalar = of.element_ty if isinstance(of, tl.block_type) else of
        return look_up(scalar) if isinstance(scalar, tl.pointer_type) else looked_up(scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_lang_once)
        patch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
        patch.setattr(interpreter, "_get_np_dtype", np_dtype)
        yield

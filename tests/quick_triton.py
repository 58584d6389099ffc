"""Triton's interpreter without three things that it does over and over, a third of the time of these tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from triton import language as tl
from triton.runtime import interpreter

Change = tuple[object, str, object]


class _RecordingScope(interpreter._LangPatchScope):  # type: ignore[misc]
    """Remembers what it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Change] = []

    def set_attr(self, obj: object, name: str, value: object) -> None:
        super().set_attr(obj, name, value)
        self.made.append((obj, name, value))


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Let launches patch `triton.language` by the changes of the first one, which looks through all its members; let a
    call of one kernel's function by another patch nothing, as the launch has done it; and keep the table from Triton's
    types to numpy's, which is made for each look into it.
    """
    patch_lang, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    look_up = interpreter._get_np_dtype
    looked_up = cache(look_up)
    patched: set[frozenset[bool]] = set()
    recorded: dict[frozenset[bool], list[Change]] = {}

    def patch_lang_once(fn: Any) -> Any:
        seen = frozenset(value is tl for value in fn.__globals__.values() if value is tl or value is tl.core)
        if seen in patched:
            return None
        is_first = not patched  # members that another call has patched already would not be found
        patched.add(seen)
        if seen in recorded:
            scope = interpreter._LangPatchScope()
            for change in recorded[seen]:
                scope.set_attr(*change)
            return scope
        if not is_first:
            return patch_lang(fn)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(interpreter, "_LangPatchScope", _RecordingScope)
            scope = patch_lang(fn)
        recorded[seen] = scope.made
        return scope

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

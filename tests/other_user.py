"""A function called by a process of another user of this machine. Needs root."""

import encodings.idna  # noqa: F401 - that user may not be able to read it when it is wanted
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import ParamSpec, TypeVar

import pytest

P = ParamSpec("P")
T = TypeVar("T")

NOBODY = 65534
_TIMEOUT_S = 30.0

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")


def as_nobody(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a module's function in a new process that becomes user `nobody` after importing the module, and return the
    result. That user may be unable to read the module. Raises `AssertionError` if the function raises."""
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    ours, its = context.Pipe(duplex=False)
    process = context.Process(target=_live, args=(its, function, args, kwargs), daemon=True)
    process.start()
    its.close()
    try:
        assert ours.poll(_TIMEOUT_S), f"the process of the other user has not answered within {_TIMEOUT_S:g} s"
        has_returned, result = ours.recv()
        assert has_returned, result
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()
    return result  # type: ignore[no-any-return]


def _live(
    pipe: Connection, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    try:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        pipe.send((True, function(*args, **kwargs)))
    except Exception:  # noqa: BLE001 - whatever it is, the test shows it
        pipe.send((False, traceback.format_exc()))

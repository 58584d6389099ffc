"""Lets the engines of a process that imports this fork their ranks from the tests' server of `tests.forking`.

A rank that starts as a program imports torch and transformers: 4 CPU seconds. That it does start as a program is proved
by `test_parallel.py`, with `as_program`.
"""

import contextlib
import gc
import importlib
import multiprocessing
import multiprocessing.forkserver as stdlib
import os
import socket
import subprocess
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from baton_serve.engine.kv.kv_cache import KVCache
from baton_serve.engine.parallel import ranks, tp_worker
from baton_serve.engine.parallel.channel import Channel
from baton_serve.engine.parallel.commands import CommandAnswer
from baton_serve.engine.step import cache_sizing

as_program = ranks._start
OWN_MEMORY = "BATON_TEST_OWN_KV_MEMORY"
"""Environment variable: if it is set, ranks on CPUs keep their parts of blocks in memory of their own, as on devices,
and whole blocks in a mirror."""


class _Forked:
    """Implements the part of `subprocess.Popen` that `Ranks` and its tests use."""

    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None
        self.pid = process.pid
        self._process = process

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
        return status

    def kill(self) -> None:
        self._process.kill()


def as_fork(number: int, program: str) -> ranks._Rank:
    """Start the rank `number` as a fork; stands in for `ranks._start`. Ranks of pooling models stay programs."""
    if program == ranks.POOLING_RANK:
        return as_program(number, program)
    use_own_memory()
    if multiprocessing.parent_process() is None:
        from tests.forking import forks

        forks()
    else:  # this process is a fork of the server itself
        stdlib._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    ours, its = socket.socketpair()
    outputs = [Connection(os.dup(descriptor), readable=False) for descriptor in (1, 2)]
    with its:
        arguments = (program, its, os.getpid(), dict(os.environ), *outputs)
        process = multiprocessing.get_context("forkserver").Process(target=_run, args=arguments)
        process.start()
    for output in outputs:
        output.close()
    rank: Any = _Forked(process)
    return ranks._Rank(number, rank, Channel(ours, CommandAnswer, send_timeout_s=ranks.SEND_TIMEOUT_S))


def ranks_of(pid: int) -> list[psutil.Process]:
    """Return the other ranks of an engine of the process `pid`, whose children forks are not."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            threads = Path(f"/proc/{process.pid}/task").glob("*/comm")
            if any(thread.read_text().strip() == _name(pid) for thread in threads):
                found.append(process)
    return found


def _name(parent: int) -> str:
    return f"rank {parent}"


def _show_name(name: str) -> None:
    """Give this process a thread with this name, by which others find it. Libraries may rename the main thread."""
    is_named = threading.Event()

    def carry() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        is_named.set()
        threading.Event().wait()

    threading.Thread(target=carry, daemon=True).start()
    is_named.wait()


def use_own_memory() -> None:
    """Keep the KV caches of this process's ranks in memory of their own, if the environment says so."""
    if os.environ.get(OWN_MEMORY):

        def mirrored(*arguments: Any, **settings: Any) -> KVCache:
            return KVCache(*arguments, **settings | {"place": "mirrored"})

        for module in (cache_sizing, tp_worker):
            module.KVCache = mirrored  # type: ignore[attr-defined]


def _run(
    program: str,
    connection: socket.socket,
    parent: int,
    variables: Mapping[str, str],
    out: Connection,
    error: Connection,
) -> None:
    gc.freeze()
    gc.enable()
    os.setpgid(0, os.getpgid(parent))
    for target, end in ((1, out), (2, error)):
        os.dup2(end.fileno(), target)
        end.close()
    os.environ.clear()
    os.environ.update(variables)
    _show_name(_name(parent))
    use_own_memory()
    os._exit(importlib.import_module(program).main([str(connection.detach()), str(parent)]))


ranks._start = as_fork

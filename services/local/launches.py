"""Two ways to start a process of a local cluster: as a program of its own, or forked from one that has imported torch.

`import torch` takes an instance 1.5 CPU seconds, and transformers, where the model needs it, 3 more; a fork of a
process that has them takes none. Only on CPUs: that no accelerator's runtime minds being forked has not been seen on a
card. Where the fork server cannot start, processes start as programs.
"""

import asyncio
import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

from baton_serve.child_command import module_command
from baton_serve.services.local.plan import Process

PRELOAD = "baton_serve.services.local.preload"
_MAX_NAME_BYTES = 15


class RunningProcess(Protocol):
    """A process, until `wait` has returned."""

    pid: int

    def fileno(self) -> int:
        """Readable when it has ended. Not the caller's to close."""

    def wait(self) -> int:
        """Blocks until it has ended. Its status, negative for a signal. What watches it is closed."""

    def signal(self, number: int) -> None:
        """Nothing happens to one that has ended."""


class ProcessLauncher(Protocol):
    def __call__(self, process: Process, environ: Mapping[str, str], out: int, error: int) -> RunningProcess:
        """Starts it; `out` and `error`, of which it gets copies, are its standard output and error."""


class ProgramLauncher:
    """Starts `python -m MODULE ARGV`, on a leash: it does not outlive this process."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __call__(self, process: Process, environ: Mapping[str, str], out: int, error: int) -> RunningProcess:
        command = module_command(
            "baton_serve.services.common.die_with_parent", str(os.getpid()), self._module, *process.argv
        )
        # In a group of its own, so that Ctrl-C reaches the supervisor alone and the order of stopping is ours; in its
        # session, because kernels that share time out among sessions first heed niceness (--engine-nice) within one.
        variables = {**environ, **process.variables}
        return _Program(
            subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=error, process_group=0
            )
        )


class _Program:
    def __init__(self, popen: "subprocess.Popen[bytes]") -> None:
        self.pid = popen.pid
        self._popen = popen
        self._pidfd = os.pidfd_open(popen.pid)

    def fileno(self) -> int:
        return self._pidfd

    def wait(self) -> int:
        if self._popen.returncode is None:
            self._popen.wait()
            os.close(self._pidfd)
        return self._popen.returncode

    def signal(self, number: int) -> None:
        if self._popen.returncode is None:  # not reaped, so the pid is not another's
            self._popen.send_signal(number)


class ForkLauncher:
    """Forks that call `module`'s main(argv), of a server that has imported `preload` and those of `modules` that there
    are. Where it cannot be forked, what `otherwise` starts."""

    def __init__(
        self, module: str, otherwise: ProcessLauncher, modules: Sequence[str] = (), *, preload: str = PRELOAD
    ) -> None:
        self._module = module
        self._otherwise = otherwise
        self._preload = preload
        self._is_fit = False
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([preload, *modules])

    def warm_up(self, then: Callable[[], object]) -> None:
        """`prepare` in the background; `then` is called in the event loop afterwards."""
        loop = asyncio.get_running_loop()

        def start() -> None:
            self.prepare()
            with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
                loop.call_soon_threadsafe(then)

        # Not in the loop's threads, which are waited for at the end.
        threading.Thread(target=start, name="forks", daemon=True).start()

    def prepare(self) -> None:
        """Starts the server and waits until it has imported everything, or has failed to."""
        probe = self._context.Process(target=_check_preload, args=(self._preload,), daemon=True)
        with contextlib.suppress(OSError, EOFError):
            probe.start()
            probe.join()
            self._is_fit = probe.exitcode == 0

    def __call__(self, process: Process, environ: Mapping[str, str], out: int, error: int) -> RunningProcess:
        if not self._is_fit:
            return self._otherwise(process, environ, out, error)
        variables = {**environ, **process.variables}
        ends = [Connection(os.dup(descriptor), readable=False) for descriptor in (out, error)]
        name = f"baton {process.name}"
        forked = self._context.Process(target=_run_forked, args=(self._module, process.argv, name, variables, *ends))
        try:
            forked.start()
        except (OSError, EOFError):  # the server is gone
            self._is_fit = False
            return self._otherwise(process, environ, out, error)
        finally:
            for end in ends:
                end.close()
        return _Fork(forked)


class _Fork:
    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None
        self.pid = process.pid
        self._process = process
        # The server reaps its forks, after which the pid may be another's; a descriptor stays this one's.
        self._pidfd: int | None = None
        with contextlib.suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(self.pid)

    def fileno(self) -> int:
        return self._process.sentinel

    def wait(self) -> int:
        self._process.join()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        status = self._process.exitcode
        assert status is not None
        return status

    def signal(self, number: int) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)


def _check_preload(preload: str) -> None:
    if not import_module(preload).is_fit_to_fork():
        sys.exit(1)


def _run_forked(
    module: str, argv: list[str], name: str, variables: Mapping[str, str], out: Connection, error: Connection
) -> None:
    """The forked process's life."""
    gc.freeze()  # what is here stays, in memory that the instances share
    gc.enable()
    os.setpgid(0, 0)
    for target, end in ((1, out), (2, error)):
        os.dup2(end.fileno(), target)
        end.close()
    os.environ.clear()
    os.environ.update(variables)
    with contextlib.suppress(OSError):  # a name for `ps`, no more
        Path("/proc/self/comm").write_bytes(name.encode()[:_MAX_NAME_BYTES])
    threading.Thread(target=_end_with_parent, name="leash", daemon=True).start()
    sys.argv[:] = [module, *argv]
    sys.exit(import_module(module).main(argv))


def _end_with_parent() -> None:
    """So a `kill -9` of the supervisor leaves no orphans."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)

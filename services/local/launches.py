"""Starts the processes of a local cluster: as new programs, or as forks of a server that has imported torch.

`import torch` takes 1.5 CPU seconds in each instance, and transformers, for models that need it, 3 more. A fork has
both already. Forks are used on CPUs only: nobody has tested on a card whether the runtime of an accelerator survives a
fork. If the fork server cannot start, processes are started as programs.
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
"""The module that the fork server imports before it forks."""
_MAX_NAME_BYTES = 15
"""Longest name of a process that Linux keeps (TASK_COMM_LEN without its final NUL)."""


class RunningProcess(Protocol):
    """A started process of the cluster. Its file descriptor is closed when `wait` returns."""

    pid: int

    def fileno(self) -> int:
        """Return a file descriptor that becomes readable when the process exits. The caller must not close it."""

    def wait(self) -> int:
        """Block until the process has exited, close its file descriptor and return the exit status, negative for a
        signal.
        """

    def signal(self, number: int) -> None:
        """Send the signal `number` to the process. Do nothing if it has exited."""


class ProcessLauncher(Protocol):
    """The interface of a way to start the processes of the cluster: `ProgramLauncher` or `ForkLauncher`."""

    def __call__(self, process: Process, environ: Mapping[str, str], out: int, error: int) -> RunningProcess:
        """Start `process` with the environment `environ`, and copies of the file descriptors `out` and `error` as its
        standard output and error.

        The caller keeps its two descriptors and closes them.
        """


class ProgramLauncher:
    """Starts each process as a new program, `python -m MODULE ARGV`. The kernel kills the program if this process dies
    (`die_with_parent`).
    """

    def __init__(self, module: str) -> None:
        self._module = module

    def __call__(self, process: Process, environ: Mapping[str, str], out: int, error: int) -> RunningProcess:
        command = module_command(
            "baton_serve.services.common.die_with_parent", str(os.getpid()), self._module, *process.argv
        )
        # A process group of its own keeps Ctrl-C away from the child, so that the supervisor decides the order of
        # stopping. The session stays ours: with autogroup scheduling Linux first divides CPU time among sessions, and
        # niceness (--engine-nice) counts only within one.
        variables = {**environ, **process.variables}
        return _Program(
            subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=error, process_group=0
            )
        )


class _Program:
    """A process that `ProgramLauncher` has started; implements `RunningProcess`."""

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
        # While the process has not been reaped, the kernel cannot give its pid to another process.
        if self._popen.returncode is None:
            self._popen.send_signal(number)


class ForkLauncher:
    """Starts processes as forks of a server process (fork server) that has already imported the modules `preload` and
    `modules`, so that they start faster; each process calls `main(argv)` of `module`. Modules that do not exist are
    skipped. If the fork server cannot be started or forked, the launcher `otherwise` is used.
    """

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
        """Start the fork server in a thread (`prepare`), then call `then` on the event loop."""
        loop = asyncio.get_running_loop()

        def start() -> None:
            self.prepare()
            with contextlib.suppress(RuntimeError):  # Raised if the loop was closed in the meantime.
                loop.call_soon_threadsafe(then)

        # The loop's own executor is joined when the loop closes, so an import that hangs would keep the process alive.
        threading.Thread(target=start, name="forks", daemon=True).start()

    def prepare(self) -> None:
        """Start the fork server and wait until it has imported everything or has failed."""
        # A trial fork proves that the server works: it checks that the imports have not left threads behind.
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
        except (OSError, EOFError):  # The fork server has died.
            self._is_fit = False
            return self._otherwise(process, environ, out, error)
        finally:
            for end in ends:
                end.close()
        return _Fork(forked)


class _Fork:
    """A process that `ForkLauncher` has forked; implements `RunningProcess`."""

    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None
        self.pid = process.pid
        self._process = process
        # The fork server reaps its forks, and the kernel may then give the pid to another process. A pidfd always means
        # this process.
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
    """Exit with status 1 if importing the module `preload` has left threads running in the fork server, which then must
    not be used. This runs in a trial fork of it.
    """
    if not import_module(preload).is_fit_to_fork():
        sys.exit(1)


def _run_forked(
    module: str, argv: list[str], name: str, variables: Mapping[str, str], out: Connection, error: Connection
) -> None:
    """Run `main(argv)` of `module` in the forked process, then exit. `name` is the process's name for `ps`, `variables`
    its whole environment, and `out` and `error` its outputs.
    """
    # Imported objects are never freed. If the collector does not touch them, their pages stay shared between instances.
    gc.freeze()
    gc.enable()
    os.setpgid(0, 0)
    for target, end in ((1, out), (2, error)):
        os.dup2(end.fileno(), target)
        end.close()
    os.environ.clear()
    os.environ.update(variables)
    with contextlib.suppress(OSError):  # The name is only shown by `ps` and `top`.
        Path("/proc/self/comm").write_bytes(name.encode()[:_MAX_NAME_BYTES])
    # PR_SET_PDEATHSIG would react to the fork server, which is the parent here, and not to the supervisor.
    threading.Thread(target=_end_with_parent, name="die-with-parent", daemon=True).start()
    sys.argv[:] = [module, *argv]
    sys.exit(import_module(module).main(argv))


def _end_with_parent() -> None:
    """Wait until the supervisor process exits, then kill this process, so that `kill -9` of the supervisor leaves no
    orphans.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)

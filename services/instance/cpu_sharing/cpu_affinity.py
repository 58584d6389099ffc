"""Sets thread count, CPU affinity and nice level of the threads that compute the model.

Call `pin_to_cores` in the engine thread before it computes anything, and `renice_threads` once the model is loaded. On
Linux affinity, name and nice level belong to each thread and are inherited by the threads that it starts.
"""

import contextlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from baton_serve.services.common.cpus.allocation import HostCpus
from baton_serve.services.common.cpus.topology import cpu_list, this_host
from baton_serve.services.instance.errors import StartFailed
from baton_serve.services.instance.settings import InstanceSettings

THREAD_NAME = "baton-engine"
"""Name of the threads that compute the model, as shown by `top -H`."""
_TASKS = Path("/proc/self/task")


def pin_to_cores(settings: InstanceSettings) -> None:
    """Give the calling thread, the engine thread, its name, and bind it to the CPU cores of `--omp-threads-bind`;
    threads that it starts inherit both.

    Raises `StartFailed` if the process may not use one of these cores.
    """
    with contextlib.suppress(OSError):
        # The kernel's own name of the thread, which threads started by it inherit: `renice_threads` finds them by it.
        (_TASKS / str(threading.get_native_id()) / "comm").write_text(THREAD_NAME)
    if settings.omp_threads_bind not in ("auto", "nobind"):
        try:
            # Thread id 0 is the calling thread. OpenMP threads that it starts inherit the affinity.
            os.sched_setaffinity(0, cpu_list(settings.omp_threads_bind))
        except (OSError, ValueError) as exc:
            raise StartFailed(f"--omp-threads-bind {settings.omp_threads_bind}: {exc}") from exc


def renice_threads(settings: InstanceSettings) -> None:
    """Add `--engine-nice` to the nice level of the engine thread and of all threads that it has started.

    Call it after loading: with a low priority, loading would take very long beside instances that already serve.
    """
    if not settings.engine_nice:
        return
    nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) + settings.engine_nice
    for task in _TASKS.iterdir():
        # A thread may end between the listing and the access.
        with contextlib.suppress(OSError):
            if (task / "comm").read_text().strip() == THREAD_NAME:
                os.setpriority(os.PRIO_PROCESS, int(task.name), nice)


def thread_count(
    settings: InstanceSettings, environ: Mapping[str, str], host: HostCpus | None = None
) -> dict[str, str]:
    """Return the environment variable OMP_NUM_THREADS with this instance's number of threads; it must be set before
    torch is imported. `host` is what this process may use of the machine (None: find out).

    Without the variable torch counts hyperthreads and ignores a cgroup's CPU limit. The result is empty if the operator
    has set the variable or chose `--omp-threads-bind nobind`.
    """
    if settings.threads is not None:
        count = settings.threads
    elif settings.omp_threads_bind == "nobind":
        return {}
    elif settings.omp_threads_bind != "auto":
        count = len(cpu_list(settings.omp_threads_bind))
    elif environ.get("OMP_NUM_THREADS"):
        return {}
    else:
        count = (host or this_host()).num_cores
    return {"OMP_NUM_THREADS": str(count)}

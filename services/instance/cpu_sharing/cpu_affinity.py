"""The cores of this instance's model: how many threads compute it, on which cores, and who gives way.

`pin_to_cores` is called in the engine's thread before it computes anything, `renice_threads` once the model is
loaded: on Linux a thread's mask, name and niceness are its own, and the threads that it starts inherit them.
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
"""Of the threads that compute the model, as `top -H` shows it."""
_TASKS = Path("/proc/self/task")


def pin_to_cores(settings: InstanceSettings) -> None:
    """Raises `StartFailed` for cores that this process may not use."""
    with contextlib.suppress(OSError):
        (_TASKS / str(threading.get_native_id()) / "comm").write_text(THREAD_NAME)
    if settings.omp_threads_bind not in ("auto", "nobind"):
        try:
            os.sched_setaffinity(0, cpu_list(settings.omp_threads_bind))
        except (OSError, ValueError) as exc:
            raise StartFailed(f"--omp-threads-bind {settings.omp_threads_bind}: {exc}") from exc


def renice_threads(settings: InstanceSettings) -> None:
    """All threads that the engine's thread has started, and itself. Not before: loading would starve beside others that
    already serve."""
    if not settings.engine_nice:
        return
    nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) + settings.engine_nice
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):  # one that has just ended
            if (task / "comm").read_text().strip() == THREAD_NAME:
                os.setpriority(os.PRIO_PROCESS, int(task.name), nice)


def thread_count(
    settings: InstanceSettings, environ: Mapping[str, str], host: HostCpus | None = None
) -> dict[str, str]:
    """A variable for OpenMP, which must be set before torch is imported: torch alone would count hyperthreads and know
    nothing of a cgroup's limit. Empty where the operator has set it, or wants torch's choice."""
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

"""The cores of this instance's model: how many threads compute it, on which cores, and who gives way.

Called in the engine's thread before it computes anything: on Linux a thread's mask and niceness are its own, and the
threads that it starts inherit them.
"""

import os
import threading
from collections.abc import Mapping

from services.common.cpu_topology import cpu_list, this_host
from services.common.cpus import Host
from services.instance.errors import StartFailed
from services.instance.settings import InstanceSettings


def take_seat(settings: InstanceSettings) -> None:
    """Raises `StartFailed` for cores that this process may not use."""
    if settings.omp_threads_bind not in ("auto", "nobind"):
        try:
            os.sched_setaffinity(0, cpu_list(settings.omp_threads_bind))
        except (OSError, ValueError) as exc:
            raise StartFailed(f"--omp-threads-bind {settings.omp_threads_bind}: {exc}") from exc
    if settings.engine_nice:
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + settings.engine_nice)


def num_threads(settings: InstanceSettings, environ: Mapping[str, str], host: Host | None = None) -> int | None:
    """None leaves it to torch, which counts hyperthreads and knows nothing of a cgroup's limit."""
    if settings.threads is not None:
        return settings.threads
    if settings.omp_threads_bind not in ("auto", "nobind"):
        return len(cpu_list(settings.omp_threads_bind))
    if settings.omp_threads_bind == "nobind" or environ.get("OMP_NUM_THREADS"):
        return None
    return (host or this_host()).num_cores

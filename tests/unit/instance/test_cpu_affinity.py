"""Threads of an instance, and the cores and priority of its pinned thread."""

import os
import threading
from collections.abc import Callable

from baton_serve.services.common.cpus.allocation import Cpu, HostCpus
from baton_serve.services.instance.cpu_sharing.cpu_affinity import pin_to_cores, renice_threads, thread_count
from baton_serve.services.instance.errors import StartFailed
from baton_serve.services.instance.settings import InstanceSettings

FOUR = HostCpus(tuple(Cpu(number, number, 0) for number in range(4)), quota=3.0)


def settings(*, threads: int | None = None, omp_threads_bind: str = "auto", engine_nice: int = 0) -> InstanceSettings:
    return InstanceSettings(model="/m", threads=threads, omp_threads_bind=omp_threads_bind, engine_nice=engine_nice)


def test_threads_are_what_was_asked_for_then_what_the_host_gives() -> None:
    def count(settings: InstanceSettings, asked: str = "") -> str | None:
        environ = {"OMP_NUM_THREADS": asked} if asked else {}
        return thread_count(settings, environ, FOUR).get("OMP_NUM_THREADS")

    assert count(settings(threads=7, omp_threads_bind="0-1")) == "7"
    assert count(settings(omp_threads_bind="0-2,5"), "1") == "4"
    assert count(settings(), "1") is None
    assert count(settings(omp_threads_bind="nobind")) is None
    assert count(settings()) == "3"


def in_a_thread(action: Callable[[], object]) -> object:
    found: list[object] = []

    def live() -> None:
        try:
            found.append(action())
        except Exception as exc:  # noqa: BLE001 - given back
            found.append(exc)

    thread = threading.Thread(target=live)
    thread.start()
    thread.join()
    return found[0]


def test_cpu_affinity_applies_to_one_thread_and_the_threads_it_starts() -> None:
    first, before = min(os.sched_getaffinity(0)), os.sched_getaffinity(0)
    nice = os.getpriority(os.PRIO_PROCESS, 0)

    def sit() -> tuple[set[int], int, int, int]:
        pinned, tid, go_on = (
            settings(omp_threads_bind=str(first), engine_nice=3),
            threading.get_native_id(),
            threading.Event(),
        )
        pin_to_cores(pinned)
        helper = threading.Thread(target=go_on.wait)
        helper.start()
        loading = os.getpriority(os.PRIO_PROCESS, tid)
        renice_threads(pinned)
        assert helper.native_id is not None
        after = [os.getpriority(os.PRIO_PROCESS, thread) for thread in (tid, helper.native_id)]
        go_on.set()
        helper.join()
        return os.sched_getaffinity(0), loading, after[0], after[1]

    assert in_a_thread(sit) == ({first}, nice, min(19, nice + 3), min(19, nice + 3))
    assert os.sched_getaffinity(0) == before and os.getpriority(os.PRIO_PROCESS, os.getpid()) == nice


def test_cores_that_do_not_exist_stop_the_start() -> None:
    error = in_a_thread(lambda: pin_to_cores(settings(omp_threads_bind="99999")))
    assert isinstance(error, StartFailed) and "99999" in str(error)

"""Reads which CPU cores this process may use: affinity mask, hyperthreads, NUMA nodes and cgroup limits."""

import os
from pathlib import Path

from baton_serve.services.common.cpus.allocation import Cpu, HostCpus


def this_host(root: Path = Path("/")) -> HostCpus:
    """Return the hardware threads that this process may use and the limit of its CPU time. `root` is the folder that
    contains `sys` and `proc`; tests pass another one than `/`.
    """
    allowed = sorted(os.sched_getaffinity(0))
    return HostCpus(tuple(_cpu(root, number) for number in allowed), _quota(root))


def cpu_list(text: str) -> tuple[int, ...]:
    """Parse a list of CPU numbers in the kernel's form, such as `0-3,8`, into all numbers. Raises `ValueError` for any
    other text.
    """
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


def _cpu(root: Path, number: int) -> Cpu:
    """Return the hardware thread with this number. If `sys` does not describe it, it counts as a core of its own on
    node 0.
    """
    folder = root / f"sys/devices/system/cpu/cpu{number}"
    try:
        siblings = cpu_list((folder / "topology/thread_siblings_list").read_text().strip())
    except (OSError, ValueError):
        siblings = (number,)
    nodes = [int(path.name.removeprefix("node")) for path in folder.glob("node[0-9]*")]
    # The lowest number of its hyperthreads identifies a core.
    return Cpu(number, min(siblings), min(nodes, default=0))


def _quota(root: Path) -> float | None:
    """Return the lowest CPU quota of all cgroups (version 2 or 1) that this process belongs to, in seconds of CPU time
    per second, or None without a limit.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    found: list[float] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        # A line is `ID:CONTROLLERS:PATH`. Version 2 has no controllers in it.
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = ["cpu", "cpu,cpuacct", "cpuacct,cpu"] if controllers else ["", "unified"]
        for mount in mounts:
            top = root / "sys/fs/cgroup" / mount
            group = top / path.strip("/")
            # In a container the path may be that of the host, while the files of its own group are at the top.
            for folder in (top, *(g for g in (group, *group.parents) if g.is_relative_to(top) and g != top)):
                limit = _limit(folder)
                found += [] if limit is None else [limit]
    return min(found, default=None)


def _limit(group: Path) -> float | None:
    """Return the CPU quota of the cgroup with the folder `group`, in seconds of CPU time per second, or None without a
    limit.
    """
    try:
        quota, period = (group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if quota in ("max", "-1"):
        return None
    return int(quota) / int(period)

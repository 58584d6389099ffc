"""Memory and descriptors of the processes of a cluster over time, and the rule by which growth is an error.

*Rule.* A life is one start of a process until its end. Its memory is the resident set size, as a median over a minute.
A life that is at least twice as old as the baseline (ten minutes) is compared with itself: its memory in its last
minute may be at most 1.1 times that in the minute after its baseline. Shorter lives have no verdict. The first process
of each role is never killed, so that every role has a life as long as the test.
"""

import asyncio
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton_serve.bench.chaos.cluster import ChaosCluster

MAX_GROWTH = 1.1
WINDOW_S = 60.0
INTERVAL_S = 5.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """Resident memory and open descriptors of a process at an age in seconds."""

    age_s: float
    resident_bytes: int
    descriptors: int


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory of one life after the baseline and at its end."""

    life: str
    baseline_bytes: float
    final_bytes: float
    final_age_s: float

    @property
    def ratio(self) -> float:
        return self.final_bytes / self.baseline_bytes


def growth_of(life: str, samples: Sequence[ProcessSample], *, baseline_s: float) -> Growth | None:
    """Return the growth of a life by the rule above, or None if it was too short."""
    if not samples or samples[-1].age_s < 2 * baseline_s:
        return None
    end_s, window_s = samples[-1].age_s, min(WINDOW_S, baseline_s)
    first = [one.resident_bytes for one in samples if baseline_s <= one.age_s < baseline_s + window_s]
    last = [one.resident_bytes for one in samples if one.age_s > end_s - window_s]
    return Growth(life, statistics.median(first), statistics.median(last), end_s) if first else None


class ProcessWatch:
    """Samples the processes of a cluster and their children, by life."""

    def __init__(self, cluster: ChaosCluster) -> None:
        self._cluster = cluster
        self._births: dict[str, float] = {}
        self.lives: dict[str, list[ProcessSample]] = defaultdict(list)
        """Samples by name of the life, such as `decode-0 (start 1)`."""

    async def run(self, until: float) -> None:
        """Take a sample every `INTERVAL_S` until `until`."""
        while time.monotonic() < until:
            self.sample()
            await asyncio.sleep(INTERVAL_S)

    def sample(self) -> None:
        """Take one sample of each process."""
        now = time.monotonic()
        for life, pid in self._pids().items():
            sample = sample_of(pid, age_s=now - self._births.setdefault(life, now))
            if sample is not None:
                self.lives[life].append(sample)

    def growths(self, *, baseline_s: float) -> list[Growth]:
        """Return the growth of each life that was long enough."""
        found = [growth_of(life, samples, baseline_s=baseline_s) for life, samples in self.lives.items()]
        return [growth for growth in found if growth is not None]

    def _pids(self) -> Mapping[str, int]:
        """Return the process ids of the present lives: Redis, the cluster's processes, and their children."""
        found = {"redis (start 1)": self._cluster.redis_pid}
        children = children_by_parent()
        for process in self._cluster.processes:
            if process.launched is not None:
                pid = process.launched.pid
                found[f"{process.name} (start {process.starts})"] = pid
                # The child of a router compiles grammars. It is known by its pid, because it may be restarted alone.
                found |= {f"{process.name}'s child {child} (start 1)": child for child in children.get(pid, [])}
        return found


def sample_of(pid: int, *, age_s: float) -> ProcessSample | None:
    """Return a sample of a process, or None if it has ended."""
    try:
        resident_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except (OSError, IndexError):
        return None
    return ProcessSample(age_s, resident_pages * PAGE_BYTES, descriptors)


def children_by_parent() -> Mapping[int, list[int]]:
    """Return the process ids of the children of each process of this machine."""
    found: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name in brackets may contain spaces; the parent is the second field after it.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            found[int(fields[1])].append(int(entry.name))
    return found

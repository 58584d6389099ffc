"""Which cores each instance of a host computes on. Pure: a described host in, seats out.

An instance's seat is for the threads that compute its model. Event loops, transfers and the router are not bound: they
find the hyperthreads that no model uses, or interrupt a model for a moment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TypeVar

from baton_serve.contracts.instance import Role

T = TypeVar("T")

MIN_CORES_PER_INSTANCE = 4
"""Per instance: with fewer, cores that one role alone would use stand idle too often to set any apart."""
BACKGROUND_NICE = 10
"""Niceness of prefill on cores that decode uses too: what is left of its work when decode's turn begins is soon
pushed aside."""


@dataclass(frozen=True, slots=True)
class Cpu:
    """One hardware thread. `core` is unique in the host, hyperthreads share it; `node` is its NUMA node."""

    number: int
    core: int
    node: int


@dataclass(frozen=True, slots=True)
class HostCpus:
    """What this process may use. `quota`: processor time per time that its cgroups allow, None without a limit."""

    cpus: tuple[Cpu, ...]
    quota: float | None = None

    @property
    def num_cores(self) -> int:
        """That compute at once."""
        cores = max(1, len({cpu.core for cpu in self.cpus}))
        return cores if self.quota is None else max(1, min(cores, int(self.quota)))


@dataclass(frozen=True, slots=True)
class CpuAllocation:
    """`cpus`: one hardware thread of each core, in order; empty: wherever the system puts the threads. `shares_cores`:
    others have the same cores, and all of them heed whose turn it is."""

    threads: int
    cpus: tuple[int, ...] = ()
    nice: int = 0
    shares_cores: bool = False


def allocate_cpus(host: HostCpus, roles: Sequence[Role]) -> list[CpuAllocation]:
    """One for each instance. Nodes are cut only where there are fewer of them than instances."""
    count = len(roles)
    is_together = "prefill" in roles and set(roles) != {"prefill"} and host.num_cores < MIN_CORES_PER_INSTANCE * count
    is_limited = host.quota is not None and host.quota < len(host.cpus)
    if is_limited or host.num_cores < count:  # a quota counts time, on whatever core it was spent
        if is_together and host.num_cores >= count:
            return _share_cores(list(range(host.num_cores)), roles, is_bound=False)
        threads = max(1, host.num_cores // max(1, count))
        return [
            CpuAllocation(threads, nice=_niceness(role) if is_together else 0, shares_cores=is_together)
            for role in roles
        ]
    nodes = _nodes(host)
    if is_together:
        return _share_cores([number for node in nodes for number in node], roles, is_bound=True)
    return [CpuAllocation(len(cpus), tuple(cpus)) for cpus in _split_nodes(nodes, count)]


def _nodes(host: HostCpus) -> list[list[int]]:
    """Of each NUMA node, the first hardware thread of each core."""
    ordered = sorted(host.cpus, key=lambda cpu: (cpu.node, cpu.core, cpu.number))
    firsts = [next(cpus) for _, cpus in groupby(ordered, key=lambda cpu: (cpu.node, cpu.core))]
    return [[cpu.number for cpu in cpus] for _, cpus in groupby(firsts, key=lambda cpu: cpu.node)]


def _share_cores(cpus: list[int], roles: Sequence[Role], *, is_bound: bool) -> list[CpuAllocation]:
    """Prefill has all cores; the others share them out among themselves."""
    others = iter(_split_evenly(cpus, sum(role != "prefill" for role in roles)))
    own = [cpus if role == "prefill" else next(others) for role in roles]
    return [
        CpuAllocation(len(part), tuple(part) if is_bound else (), _niceness(role), shares_cores=True)
        for part, role in zip(own, roles, strict=True)
    ]


def _niceness(role: Role) -> int:
    return BACKGROUND_NICE if role == "prefill" else 0


def _split_nodes(nodes: list[list[int]], count: int) -> list[list[int]]:
    """Parts of nearly the same size, each of whole nodes or within one."""
    if count <= len(nodes):
        return [[number for node in group for number in node] for group in _split_evenly(nodes, count)]
    total, seen, parts = sum(map(len, nodes)), 0, list[list[int]]()
    for node in nodes:
        seen += len(node)
        parts += _split_evenly(node, round(seen * count / total) - len(parts))
    return parts


def _split_evenly(items: list[T], count: int) -> list[list[T]]:
    """In order, sizes differing by one at most."""
    ends = [len(items) * number // count for number in range(count + 1)] if count else [0]
    return [items[start:end] for start, end in pairwise(ends)]

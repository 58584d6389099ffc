"""Decides on which CPU cores each instance of a host computes. It is pure: `topology` describes the host.

The cores are for the threads that compute the model. Event loops, transfers and the router are not bound to cores: they
run on the hyperthreads that no model uses, or interrupt a model for a moment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TypeVar

from baton_serve.contracts.instance import Role

T = TypeVar("T")

BACKGROUND_ROLES = ("prefill", "encode")
"""Roles whose work may pause while another instance on the same cores computes a decode step."""
MIN_CORES_PER_INSTANCE = 4
"""Number of cores per instance from which prefill and decode get cores of their own.

With fewer, all share the cores, because the cores of one role would be idle while the other one works.
"""
BACKGROUND_NICE = 10
"""Niceness of prefill on cores that decode uses too, so that a decode step displaces the rest of a prefill step."""


@dataclass(frozen=True, slots=True)
class Cpu:
    """One hardware thread with its `number`. The hyperthreads of one core have the same `core`; `node` is the NUMA
    node.
    """

    number: int
    core: int
    node: int


@dataclass(frozen=True, slots=True)
class HostCpus:
    """The hardware threads of this host that this process may use.

    `quota` is the limit of CPU time by its cgroups, in seconds of CPU time per second; None without a limit.
    """

    cpus: tuple[Cpu, ...]
    quota: float | None = None

    @property
    def num_cores(self) -> int:
        """The number of cores on which this process can compute at the same time, at least 1; a quota may lower it."""
        cores = max(1, len({cpu.core for cpu in self.cpus}))
        return cores if self.quota is None else max(1, min(cores, int(self.quota)))


@dataclass(frozen=True, slots=True)
class CpuAllocation:
    """The CPU cores that one instance may use for computing the model, and the number of its threads."""

    threads: int
    cpus: tuple[int, ...] = ()
    """One hardware thread of each core, in order. If it is empty, the kernel places the threads."""
    nice: int = 0
    shares_cores: bool = False
    """True if other instances use the same cores; then all of them take turns (`--core-turns`)."""


def allocate_cpus(host: HostCpus, roles: Sequence[Role]) -> list[CpuAllocation]:
    """Return the CPU cores of each instance on this host, in the order of their `roles`.

    The cores of one NUMA node are divided among instances only if there are fewer nodes than instances.
    """
    count = len(roles)
    # Prefill and another role share all cores if there are too few to separate them.
    is_together = "prefill" in roles and set(roles) != {"prefill"} and host.num_cores < MIN_CORES_PER_INSTANCE * count
    is_limited = host.quota is not None and host.quota < len(host.cpus)
    # A quota limits CPU time on all cores together, so binding to cores would not separate instances.
    if is_limited or host.num_cores < count:
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
    """Return the cores of each NUMA node. Each core is represented by the number of its first hardware thread."""
    ordered = sorted(host.cpus, key=lambda cpu: (cpu.node, cpu.core, cpu.number))
    firsts = [next(cpus) for _, cpus in groupby(ordered, key=lambda cpu: (cpu.node, cpu.core))]
    return [[cpu.number for cpu in cpus] for _, cpus in groupby(firsts, key=lambda cpu: cpu.node)]


def _share_cores(cpus: list[int], roles: Sequence[Role], *, is_bound: bool) -> list[CpuAllocation]:
    """Give all cores `cpus` to each prefill and encode worker, and divide the same cores among the other instances.
    With `is_bound`, threads are bound to these cores; otherwise only their number is limited.
    """
    others = iter(_split_evenly(cpus, sum(role not in BACKGROUND_ROLES for role in roles)))
    own = [cpus if role in BACKGROUND_ROLES else next(others) for role in roles]
    return [
        CpuAllocation(len(part), tuple(part) if is_bound else (), _niceness(role), shares_cores=True)
        for part, role in zip(own, roles, strict=True)
    ]


def _niceness(role: Role) -> int:
    return BACKGROUND_NICE if role in BACKGROUND_ROLES else 0


def _split_nodes(nodes: list[list[int]], count: int) -> list[list[int]]:
    """Divide the cores of all NUMA nodes among `count` instances into parts of nearly equal size. Each part consists of
    whole nodes or lies within one.
    """
    if count <= len(nodes):
        return [[number for node in group for number in node] for group in _split_evenly(nodes, count)]
    total, seen, parts = sum(map(len, nodes)), 0, list[list[int]]()
    for node in nodes:
        # Rounding the running total, and not the share of each node, makes the parts add up to `count`.
        seen += len(node)
        parts += _split_evenly(node, round(seen * count / total) - len(parts))
    return parts


def _split_evenly(items: list[T], count: int) -> list[list[T]]:
    """Divide `items` in order into `count` parts whose sizes differ by at most one."""
    ends = [len(items) * number // count for number in range(count + 1)] if count else [0]
    return [items[start:end] for start, end in pairwise(ends)]

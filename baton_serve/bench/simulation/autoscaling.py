"""Simulate the chart's autoscaling: its signals, and the rule by which Kubernetes computes the number of replicas.

A pool needs ceil(size x signal / target) instances, for its largest signal; a deviation of up to a tenth changes
nothing (kubernetes.io, "Horizontal Pod Autoscaling", algorithm details). The behaviour is the chart's: after 30 s of
higher load at most two more per minute, after `stabilization_s` of lower load one fewer per two minutes.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

import yaml

from baton_serve.bench.simulation.cluster import SimulatedCluster
from baton_serve.bench.simulation.instance import SimulatedInstance
from baton_serve.contracts.instance import Role

POLL_S = 15.0
"""Interval of the autoscaler, as in Kubernetes."""
TOLERANCE = 0.1
"""Relative deviation from the target that changes nothing, as in Kubernetes."""
UP_STABILIZATION_S, UP_COUNT, UP_PERIOD_S = 30.0, 2, 60.0
"""Limits of growth: the size must have been needed for this long; at most `UP_COUNT` new instances per period."""
DOWN_COUNT, DOWN_PERIOD_S = 1, 120.0
"""Limits of shrinking: at most `DOWN_COUNT` fewer instances per period."""


class ScalingError(Exception):
    """The file of chart values does not describe autoscaling of the pools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRules:
    """Bounds and targets of one pool, as `prefill.autoscaling` in the chart's values."""

    min_replicas: int = 1
    max_replicas: int = 4
    wait_s: float = 1.0
    kv_cache_usage: float = 0.8
    inter_token_s: float = 0.1
    stabilization_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRules:
    """Rules of all pools that are scaled."""

    pools: Mapping[Role, PoolRules]
    start_s: float = 60.0
    """Seconds from the decision until a new instance takes work: image, weights, warm-up."""


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Number of instances per role from `at_s` on."""

    at_s: float
    sizes: dict[Role, int]


def rules_from_values(path: Path | None, *, start_s: float, roles: list[Role]) -> ScalingRules:
    """Read the rules from a file of chart values, or return the chart's defaults if `path` is None. Raises
    `ScalingError`."""
    if path is None:
        return ScalingRules(pools={role: PoolRules() for role in roles}, start_s=start_s)
    try:
        values = yaml.safe_load(path.read_text())
        return ScalingRules(pools={role: _pool(values[role]["autoscaling"]) for role in roles}, start_s=start_s)
    except OSError as exc:
        raise ScalingError(f"cannot read {path}: {exc.strerror}") from exc
    except (KeyError, TypeError, ValueError, yaml.YAMLError) as exc:
        raise ScalingError(f"{path} needs `autoscaling` of {', '.join(roles)}, as in the chart's values.yaml") from exc


def _pool(autoscaling: Mapping[str, object]) -> PoolRules:
    targets = autoscaling["targets"]
    if not isinstance(targets, Mapping):
        raise TypeError("targets")
    return PoolRules(
        min_replicas=int(str(autoscaling["minReplicas"])),
        max_replicas=int(str(autoscaling["maxReplicas"])),
        wait_s=float(targets["waitSeconds"]),
        kv_cache_usage=float(targets["kvCacheUsage"]),
        inter_token_s=float(targets["interTokenSeconds"]),
        stabilization_s=float(str(autoscaling["stabilizationSeconds"])),
    )


@dataclass(slots=True)
class PoolScaler:
    """The autoscaler of one pool, without I/O. It remembers earlier recommendations and changes."""

    rules: PoolRules
    _wanted: deque[tuple[float, int]] = field(default_factory=deque)
    """Recommended sizes with their times, as far back as the longer stabilization window."""
    _changes: deque[tuple[float, int]] = field(default_factory=deque)
    """Changes of the size with their times."""

    def size(self, now: float, current: int, ratio: float) -> int:
        """Return the new number of instances. `ratio` is the largest of signal / target."""
        if not self._wanted:  # as in Kubernetes: the initial size counts as a recommendation
            self._wanted.append((now, current))
        wanted = current if abs(ratio - 1) <= TOLERANCE else ceil(current * ratio)
        self._wanted.append((now, max(self.rules.min_replicas, min(self.rules.max_replicas, wanted))))
        longest = max(UP_STABILIZATION_S, self.rules.stabilization_s)
        while self._wanted[0][0] < now - longest:
            self._wanted.popleft()
        # Grow only to what was needed during the whole window; shrink only to the most that was needed in it.
        lowest = min(size for at, size in self._wanted if at >= now - UP_STABILIZATION_S)
        highest = max(size for at, size in self._wanted if at >= now - self.rules.stabilization_s)
        size = min(max(current, lowest), highest)
        size = min(size, current + UP_COUNT - self._changed(now, UP_PERIOD_S, up=True))
        size = max(size, current - DOWN_COUNT + self._changed(now, DOWN_PERIOD_S, up=False))
        if size != current:
            self._changes.append((now, size - current))
        return size

    def _changed(self, now: float, period_s: float, *, up: bool) -> int:
        """Return by how many instances the pool grew (`up`) or shrank in the last `period_s`."""
        return sum(abs(by) for at, by in self._changes if at > now - period_s and (by > 0) == up)


class Autoscaler:
    """Scales the pools of a simulated cluster; every change of a size is appended to `history`."""

    def __init__(self, cluster: SimulatedCluster, rules: ScalingRules, history: list[PoolSizes]) -> None:
        self._cluster = cluster
        self._rules = rules
        self._history = history
        self._scalers = {role: PoolScaler(pool) for role, pool in rules.pools.items()}
        self._starting: dict[Role, int] = dict.fromkeys(rules.pools, 0)
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(POLL_S, self._poll)
        self._note()

    def stop(self) -> None:
        self._timer.cancel()

    def _poll(self) -> None:
        for role, scaler in self._scalers.items():
            pool = self._cluster.pool(role)
            current = len(pool) + self._starting[role]
            # A pool without instances reports nothing.
            if not pool:
                continue
            size = scaler.size(self._loop.time(), current, _ratio(role, pool, self._rules.pools[role]))
            for _ in range(size - current):
                self._starting[role] += 1
                self._loop.call_later(self._rules.start_s, self._add, role)
            for instance in sorted(pool, key=lambda i: i.record.instance, reverse=True)[: max(0, current - size)]:
                self._cluster.drain(instance)
        self._note()
        self._timer = self._loop.call_later(POLL_S, self._poll)

    def _add(self, role: Role) -> None:
        self._starting[role] -= 1
        self._cluster.add(role)

    def _note(self) -> None:
        sizes = {role: len(self._cluster.pool(role)) for role in self._scalers}
        if not self._history or self._history[-1].sizes != sizes:
            self._history.append(PoolSizes(self._loop.time(), sizes))


def _ratio(role: Role, pool: list[SimulatedInstance], rules: PoolRules) -> float:
    """Return the largest of the role's signals divided by its target. A signal is the mean over instances."""
    loads = [instance.load() for instance in pool]
    ratios = []
    if role != "decode":
        ratios.append(sum(load.queued_tokens / load.prefill_tokens_per_s for load in loads) / rules.wait_s)
    if role != "prefill":
        ratios.append(sum(1 - load.free_blocks / load.total_blocks for load in loads) / rules.kv_cache_usage)
        ratios.append(sum(load.decode_step_s * (load.running > 0) for load in loads) / rules.inter_token_s)
    return max(ratios) / len(pool)

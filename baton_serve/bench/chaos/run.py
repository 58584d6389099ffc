"""Kill and freeze processes of a cluster while clients send requests: each answer must equal the undisturbed one.

The cluster has three prefill and three decode instances and two routers with the demo model and a LoRA adapter, and a
Redis server of its own. Honest clients stream, ask for whole answers, tool calls and structured output, and cancel.
Every few seconds one random process receives SIGKILL, or SIGSTOP for a while. A killed process is started again, as a
supervisor would do. A request may only fail together with its own router. With --hostile-per-s another client sends
requests that once ended or blocked a router. At the end everything must be idle: no request, lease, held block,
assigned load or descriptor may be left, and no process may have grown by more than a tenth since its first minutes.
"""

import argparse
import asyncio
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import uvloop

from baton_serve.bench.chaos.cluster import ChaosCluster, ClusterProcess, running_cluster
from baton_serve.bench.chaos.honest import STREAM_TIMEOUT_S, HonestClients, HonestTally
from baton_serve.bench.chaos.hostile import HostileClient, HostileTally
from baton_serve.bench.chaos.idle import leftovers, open_descriptors
from baton_serve.bench.chaos.memory import MAX_GROWTH, Growth, ProcessWatch
from baton_serve.bench.chaos.requests import honest_requests
from baton_serve.bench.report import Row, show

FREEZE_S = (0.0, 0.0, 1.0, 6.0)
"""Durations of a disturbance, equally likely; 0 is a kill, unless the process may not be killed."""


async def disturb(cluster: ChaosCluster, options: argparse.Namespace, counts: Counter[str], until: float) -> None:
    """Kill or freeze a random process every `every_s` seconds until `until`. A third of the disturbances are kills."""
    rng = random.Random(options.seed)
    thawing: set[asyncio.Task[None]] = set()
    while time.monotonic() + options.every_s < until:
        await asyncio.sleep(options.every_s)
        process = rng.choice(cluster.processes)
        frozen_s = rng.choice(FREEZE_S if process.may_be_killed else FREEZE_S[2:])
        kind = "router" if process.is_router else process.name.split("-")[0]
        counts[f"{kind} {'frozen' if frozen_s else 'killed'}"] += 1
        # A frozen process also disturbs streams that begin while it is frozen: count from its end.
        process.disturbed_at = time.monotonic() + frozen_s
        if frozen_s:
            process.send(signal.SIGSTOP)
            thawing.add(asyncio.create_task(_thaw(process, frozen_s)))
        else:
            process.send(signal.SIGKILL)
    await asyncio.gather(*thawing)


async def _thaw(process: ClusterProcess, after_s: float) -> None:
    await asyncio.sleep(after_s)
    process.send(signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class ChaosOutcome:
    """Everything that one run has counted. `left` has one line for each thing that is not idle at the end."""

    disturbances: Counter[str]
    honest: HonestTally
    hostile: HostileTally
    growths: list[Growth]
    left: list[str]
    descriptors: dict[str, tuple[int, int]]
    """Open descriptors of each process before and after the load."""

    @property
    def is_sound(self) -> bool:
        has_grown = any(growth.ratio > MAX_GROWTH for growth in self.growths)
        return not (self.honest.differ or self.honest.failed or self.hostile.wrong or self.left or has_grown)

    def rows(self, case: str) -> Iterator[Row]:
        """Yield the rows of the report. A count of errors has the limit 0."""
        honest, hostile = self.honest, self.hostile
        for what, count in sorted(self.disturbances.items()):
            yield Row("chaos", f"{case}: {what}", float(count), "times")
        for way, count in sorted(honest.ended.items()):
            yield Row("chaos", f"{case}: {way}, as undisturbed", float(count), "requests")
        yield Row("chaos", f"{case}: ended different", float(len(honest.differ)), "requests", 0.0)
        yield Row("chaos", f"{case}: failed although their router was up", float(len(honest.failed)), "requests", 0.0)
        yield Row("chaos", f"{case}: ended with their router", float(honest.excused), "requests")
        yield Row("chaos", f"{case}: refused, no instance was up", float(honest.refused), "times")
        yield Row("chaos", f"{case}: found no router listening", float(honest.not_connected), "times")
        for (name, status), count in sorted(hostile.statuses.items()):
            answer = f"status {status}" if status else "closed"
            yield Row("chaos", f"{case}: hostile, {name}: {answer}", float(count), "requests")
        for name, seconds in sorted(hostile.slowest_s.items()):
            yield Row("chaos", f"{case}: hostile, {name}: slowest", seconds, "s")
        yield Row("chaos", f"{case}: hostile, answered wrongly", float(len(hostile.wrong)), "requests", 0.0)
        yield Row("chaos", f"{case}: hostile, ended with their process", float(hostile.excused), "requests")
        yield Row("chaos", f"{case}: hostile, found no process listening", float(hostile.not_connected), "times")
        for growth in self.growths:
            minutes = growth.final_age_s / 60
            what = f"memory of {growth.life} after {minutes:.0f} min, {growth.final_bytes / 2**20:.0f} MiB"
            yield Row("chaos", f"{case}: {what}", growth.ratio, "of its first minutes", MAX_GROWTH)
        for name, (before, after) in sorted(self.descriptors.items()):
            yield Row("chaos", f"{case}: descriptors of {name}", float(after), "descriptors", float(before))
        yield Row("chaos", f"{case}: left behind", float(len(self.left)), "things", 0.0)


async def bench(options: argparse.Namespace) -> ChaosOutcome:
    """Run the test and return what happened."""
    # No connection is reused: one that was idle while its router was killed would fail an innocent request.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    counts: Counter[str] = Counter()
    async with (
        running_cluster(options) as cluster,
        httpx.AsyncClient(timeout=STREAM_TIMEOUT_S, limits=limits) as client,
    ):
        await cluster.wait_until_complete(client)
        honest = HonestClients(client, cluster, honest_requests())
        hostile = HostileClient(client, cluster, seed=options.seed)
        watch = ProcessWatch(cluster)
        await honest.learn()
        left = await leftovers(client, cluster)
        before = open_descriptors(cluster)
        until = time.monotonic() + options.minutes * 60
        await asyncio.gather(
            disturb(cluster, options, counts, until),
            watch.run(until),
            hostile.run(until, per_s=options.hostile_per_s),
            *(honest.run(until, seed=options.seed * 1000 + i) for i in range(options.streams)),
        )
        await cluster.wait_until_complete(client)
        left += await leftovers(client, cluster, before)
        after = open_descriptors(cluster)
    return ChaosOutcome(
        disturbances=counts,
        honest=honest.tally,
        hostile=hostile.tally,
        growths=watch.growths(baseline_s=options.baseline_s),
        left=left,
        descriptors={name: (before[name], count) for name, count in after.items()},
    )


def run(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="baton-bench chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="duration of the test in minutes")
    parser.add_argument("--streams", type=int, default=20, help="number of concurrent honest requests")
    parser.add_argument("--every-s", type=float, default=5.0, help="seconds between two disturbances")
    parser.add_argument("--hostile-per-s", type=float, default=0.0, help="hostile requests per second")
    parser.add_argument(
        "--baseline-s", type=float, default=600.0, help="age of a process at which its memory is first taken"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the random choices")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each instance")
    parser.add_argument(
        "--logs", default="", help="folder for the logs of the processes (default: a new temporary folder)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per row")
    options = parser.parse_args(arguments)
    outcome = uvloop.run(bench(options))
    for line in [*outcome.honest.differ, *outcome.honest.failed, *outcome.hostile.wrong, *outcome.left]:
        sys.stderr.write(f"error: {line}\n")
    case = f"{options.minutes:g} min, {options.streams} at a time"
    show(outcome.rows(case), as_json=options.json)
    sys.exit(0 if outcome.is_sound else 1)

"""Look for requests, leases, blocks, load and descriptors that are left in a process when all clients have ended."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

from baton_serve.bench.chaos.cluster import ChaosCluster, ClusterProcess
from baton_serve.bench.chaos.memory import sample_of

IDLE_TIMEOUT_S = 100.0
"""Longest time until all is idle: routers keep a connection without a request for 75 s."""
INSTANCE_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "baton:held_blocks", "baton:leases")
ROUTER_GAUGES = ("baton:requests_in_flight", "baton:router_waiting_requests", "baton:router_assigned_requests")
SPARE_DESCRIPTORS = 8
"""Descriptors that a process may have more than before the load, for links to peers that it had not used by then."""


def busy_gauges(values: Mapping[str, int], *, is_router: bool) -> list[str]:
    """Return a text for each of the gauges of a process that is not at its idle value.

    Raises `KeyError` for a gauge that the process does not have: one that was renamed must not look idle.
    """
    names = ROUTER_GAUGES if is_router else INSTANCE_GAUGES
    found = [f"{name}={values[name]}" for name in names if values[name]]
    if not is_router and values["baton:free_blocks"] != values["baton:total_blocks"]:
        found.append(f"free blocks {values['baton:free_blocks']}/{values['baton:total_blocks']}")
    return found


async def leftovers(
    client: httpx.AsyncClient, cluster: ChaosCluster, descriptors_before: Mapping[str, int] | None = None
) -> list[str]:
    """Wait until all is idle, at most `IDLE_TIMEOUT_S`. Return a line for each thing that is left even then."""
    deadline, left = time.monotonic() + IDLE_TIMEOUT_S, ["not looked at"]
    while left and time.monotonic() < deadline:
        left = []
        for process in cluster.processes:
            busy = busy_gauges(await _gauges(client, process), is_router=process.is_router)
            left += [f"{process.name} {text}" for text in busy]
        if descriptors_before is not None:
            left += excess_descriptors(descriptors_before, open_descriptors(cluster))
        await asyncio.sleep(1.0)
    return left


async def _gauges(client: httpx.AsyncClient, process: ClusterProcess) -> Mapping[str, int]:
    """Return the sums of the samples of each name in the metrics of a process."""
    values: Counter[str] = Counter()
    text = (await client.get(f"http://127.0.0.1:{process.port}/metrics")).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] += int(sample.value)
    return dict(values)


def open_descriptors(cluster: ChaosCluster) -> dict[str, int]:
    """Return the number of open descriptors of each process that runs, by name."""
    found: dict[str, int] = {}
    for process in cluster.processes:
        sample = sample_of(process.launched.pid, age_s=0.0) if process.launched is not None else None
        if sample is not None:
            found[process.name] = sample.descriptors
    return found


def excess_descriptors(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """Return a line for each process with more descriptors than before and `SPARE_DESCRIPTORS`."""
    return [
        f"{name} {count} descriptors, {before[name]} before"
        for name, count in after.items()
        if count > before[name] + SPARE_DESCRIPTORS
    ]

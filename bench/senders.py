"""Several processes that send one load together: the measuring must not be what is measured."""

import argparse
import asyncio
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from bench.serve import Outcome, drive
from bench.workload import Request

LEAD_S = 3.0
"""For the processes to start."""


@dataclass(frozen=True, slots=True)
class Target:
    url: str
    model: str
    timeout_s: float


def send_all(requests: list[Request], target: Target, *, processes: int) -> list[Outcome]:
    """In the order of `requests`. A request that takes longer than the target's time counts as failed."""
    start = time.time() + LEAD_S
    parts = [list(range(first, len(requests), processes)) for first in range(min(processes, len(requests)))]
    outcomes: dict[int, Outcome] = {}
    with ProcessPoolExecutor(len(parts), mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_send, [requests[n] for n in part], target, start) for part in parts]
        for part, future in zip(parts, futures, strict=True):
            outcomes |= dict(zip(part, future.result(), strict=True))
    return [outcomes[number] for number in range(len(requests))]


def _send(requests: list[Request], target: Target, start: float) -> list[Outcome]:
    options = argparse.Namespace(
        base_url=target.url,
        model=target.model,
        api_key=None,
        max_concurrency=None,
        ignore_eos=True,
        timeout_s=target.timeout_s,
    )
    time.sleep(max(0.0, start - time.time()))
    outcomes, _ = asyncio.run(drive(requests, options))
    return outcomes

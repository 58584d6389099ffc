"""Measure the router's index of cached blocks in this process: lookups, updates and memory.

`baton-bench index [--instances 256] [--prompt-blocks 8000] [--blocks 10000000] [--json]`

Block hashes are 16 random bytes, as real ones. Each value stands beside its design target.
"""

import argparse
import gc
import secrets
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from baton_serve.bench.report import Row, show
from baton_serve.contracts.events import BlocksRemoved, BlocksStored, EventBatch
from baton_serve.contracts.identity import BlockHash, Generation, InstanceId
from baton_serve.contracts.messages import Snapshot
from baton_serve.services.router.placement.block_index import BlockIndex

MATCH_S, MEMORY_BYTES, EVENTS_PER_S = 1e-3, 2e9, 100_000
"""Design targets: seconds of a lookup, bytes of the index, and block events per second."""
_GENERATION = Generation(1)
_BATCH_BLOCKS = 32
"""Blocks of one event batch: 2,048 tokens, the chunk of one prefill step."""


def names(count: int) -> list[BlockHash]:
    """Return random block hashes."""
    data = secrets.token_bytes(16 * count)
    return [BlockHash(data[start : start + 16]) for start in range(0, len(data), 16)]


def instances(count: int) -> list[InstanceId]:
    return [InstanceId(f"prefill-{number}") for number in range(count)]


def filled(ids: Sequence[InstanceId], cached: Sequence[Sequence[BlockHash]]) -> BlockIndex:
    """Return an index in which each instance has these blocks."""
    index = BlockIndex()
    for instance, blocks in zip(ids, cached, strict=True):
        index.add(instance, _GENERATION)
        index.load(Snapshot(instance=instance, generation=_GENERATION, sequence=0, device=list(blocks)))
    return index


def match_seconds(ids: Sequence[InstanceId], prompt: Sequence[BlockHash], rounds: int) -> Iterator[tuple[str, float]]:
    """Yield the median seconds to look up a prompt that all instances have, of which each has a different part, that
    one has, and that none has."""
    parts = [len(prompt) * (number + 1) // len(ids) for number in range(len(ids))]
    cases: list[tuple[str, list[Sequence[BlockHash]]]] = [
        ("all of it cached everywhere", [prompt] * len(ids)),
        ("a different part cached on each", [prompt[:part] for part in parts]),
        ("all of it cached on one", [prompt, *([[]] * (len(ids) - 1))]),
        ("nothing cached", [[] for _ in ids]),
    ]
    for case, cached in cases:
        index = filled(ids, cached)
        seconds = []
        for _ in range(rounds):
            started = time.perf_counter()
            found = index.match(prompt)
            seconds.append(time.perf_counter() - started)
        assert max((match.device for match in found.values()), default=0) == max(len(blocks) for blocks in cached)
        yield case, statistics.median(seconds)


def memory_bytes(ids: Sequence[InstanceId], blocks: int) -> float:
    """Return the resident bytes that `blocks` different blocks add, spread over the instances, including the hashes."""
    share = blocks // len(ids)
    index = BlockIndex()
    gc.collect()
    before = _resident()
    for instance in ids:
        index.add(instance, _GENERATION)
        index.load(Snapshot(instance=instance, generation=_GENERATION, sequence=0, device=names(share)))
    gc.collect()
    return (_resident() - before) * blocks / (share * len(ids))


def events_per_s(ids: Sequence[InstanceId], batches: int) -> float:
    """Return how many block events per second the index applies, in batches of one chunk each. The cache of an
    instance holds a hundred chunks."""
    index = filled(ids, [[] for _ in ids])
    kept: list[list[list[BlockHash]]] = [[] for _ in ids]
    queue: list[EventBatch] = []
    num_blocks = 0
    for number in range(batches):
        at, sequence = number % len(ids), number // len(ids) + 1
        stored = names(_BATCH_BLOCKS)
        kept[at].append(stored)
        removed = [BlocksRemoved(kept[at].pop(0))] if len(kept[at]) > 100 else []
        queue.append(EventBatch(ids[at], _GENERATION, sequence, [*removed, BlocksStored(stored)]))
        num_blocks += len(stored) * (1 + len(removed))
    started = time.perf_counter()
    for batch in queue:
        assert index.apply(batch)
    return num_blocks / (time.perf_counter() - started)


def _resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmRSS in /proc/self/status")


def measure(options: argparse.Namespace) -> Iterator[Row]:
    ids = instances(options.instances)
    # Measure memory first: later, the allocator would reuse memory freed by other cases, which would not be counted.
    size = memory_bytes(ids, options.blocks)
    yield Row("index", f"{options.blocks:,} blocks", size / 1e9, "GB", MEMORY_BYTES / 1e9, MEMORY_BYTES / size)
    prompt = names(options.prompt_blocks)
    for case, seconds in match_seconds(ids, prompt, options.rounds):
        name = f"match {options.prompt_blocks} x {options.instances}: {case}"
        yield Row("index", name, seconds * 1e3, "ms", MATCH_S * 1e3, MATCH_S / seconds)
    rate = events_per_s(ids, options.batches)
    yield Row("index", "events (blocks) on one core", rate, "/s", EVENTS_PER_S, rate / EVENTS_PER_S)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="baton-bench index", description=__doc__)
    made.add_argument("--instances", type=int, default=256, help="number of instances")
    made.add_argument("--prompt-blocks", type=int, default=8000, help="blocks of the prompt that is looked up")
    made.add_argument("--blocks", type=int, default=10_000_000, help="number of blocks for the memory case")
    made.add_argument("--batches", type=int, default=40_000, help="number of event batches")
    made.add_argument("--rounds", type=int, default=21, help="repetitions of each lookup")
    made.add_argument("--json", action="store_true", help="print one JSON object per row")
    return made


def run(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    show(measure(options), as_json=options.json)

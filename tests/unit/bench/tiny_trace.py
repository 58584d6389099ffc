"""A trace as Mooncake writes it, small enough to follow by hand."""

import json
import random
from pathlib import Path

from baton_serve.bench.serving.traces import Trace, load_trace
from baton_serve.bench.simulation.cost import CostModel
from baton_serve.bench.simulation.run import Scenario
from baton_serve.services.router.placement.policy import PolicyName

COST = CostModel(
    name="round numbers",
    prefill_s_per_token=1e-3,
    base_steps=((1, 0.010), (10, 0.019)),
    step_s_per_kv_token=1e-6,
    kv_tokens=512 * 40,
    kv_bytes_per_token=1000,
    link_bytes_per_s=1e9,
)


def write_conversations(path: Path, *, conversations: int = 13, turns: int = 4, every_s: float = 3.0) -> Path:
    """Each turn's prompt is the one before and two hashes more; the last hash is half full."""
    rng = random.Random(7)
    rows: list[tuple[int, str]] = []
    for conversation in range(conversations):
        for turn in range(turns):
            hashes = [0, *(conversation * 100 + number + 1 for number in range(2 * turn + 2))]
            row = {
                "timestamp": round(1000 * (turn * conversations + conversation + rng.random()) * every_s),
                "input_length": len(hashes) * 512 - 256,
                "output_length": rng.randrange(2, 40),
                "hash_ids": hashes,
            }
            rows.append((round(1000 * (turn * conversations + conversation)), json.dumps(row)))
    path.write_text("".join(line + "\n" for _, line in sorted(rows)))
    return path


def conversations(folder: Path, *, length_scale: float = 1.0, time_scale: float = 1.0) -> Trace:
    path = write_conversations(folder / "trace.jsonl")
    return load_trace(path, length_scale=length_scale, time_scale=time_scale)


def scenario(trace: Trace, *, policy: PolicyName = "prefix", prefill: int = 2, decode: int = 1) -> Scenario:
    return Scenario(
        trace=trace,
        cost=COST,
        num_prefill=prefill,
        num_decode=decode,
        policy=policy,
        block_tokens=trace.hash_tokens or 64,
    )

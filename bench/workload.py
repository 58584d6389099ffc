"""Requests to send: random prompts of a length, or a public trace; and when to send them."""

import csv
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

WORDS = (
    "the a one block of tokens moves from prefill to decode while prompt router cache copy link memory step layer "
    "model answer question time place pool load prefix stream batch head page name host device key value"
).split()


@dataclass(frozen=True, slots=True)
class Request:
    """`at_s` is when it is sent, counted from the start. Of text, lengths in tokens are approximate."""

    at_s: float
    prompt: str | list[int]
    max_tokens: int


def random_prompt(rng: random.Random, tokens: int) -> str:
    """Fresh words, so that no server's prefix cache can answer; the first word is unique per prompt."""
    return " ".join([f"{rng.getrandbits(40):x}", *(rng.choice(WORDS) for _ in range(max(tokens - 8, 1)))])


def random_requests(
    *, count: int, input_tokens: int, output_tokens: int, rate_per_s: float, range_ratio: float, seed: int
) -> list[Request]:
    """Poisson arrivals at `rate_per_s` (inf: all at once); lengths uniform in ± `range_ratio`."""
    rng = random.Random(seed)
    clock = 0.0
    requests = []
    for _ in range(count):
        vary = 1 + rng.uniform(-range_ratio, range_ratio)
        prompt = random_prompt(rng, round(input_tokens * vary))
        requests.append(Request(at_s=clock, prompt=prompt, max_tokens=max(1, round(output_tokens * vary))))
        clock += rng.expovariate(rate_per_s) if rate_per_s != float("inf") else 0.0
    return requests


def _azure(path: Path) -> Iterator[tuple[float, int, int]]:
    start: datetime | None = None
    with path.open() as lines:
        for row in csv.DictReader(lines):
            when = datetime.fromisoformat(row["TIMESTAMP"][:26])
            start = start or when
            yield (when - start).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"])


def _mooncake(path: Path) -> Iterator[tuple[float, int, int]]:
    for line in path.read_text().splitlines():
        row = json.loads(line)
        yield row["timestamp"] / 1000, row["input_length"], row["output_length"]


def trace_requests(path: Path, *, count: int, length_scale: float, time_scale: float, seed: int) -> list[Request]:
    """The first `count` requests of a trace (Azure `.csv`, Mooncake `.jsonl`), lengths and times multiplied."""
    rng = random.Random(seed)
    rows = _azure(path) if path.suffix == ".csv" else _mooncake(path)
    requests: list[Request] = []
    for at_s, inputs, outputs in rows:
        if len(requests) == count:
            break
        prompt = random_prompt(rng, max(9, round(inputs * length_scale)))
        requests.append(
            Request(at_s=at_s * time_scale, prompt=prompt, max_tokens=max(1, round(outputs * length_scale)))
        )
    return requests

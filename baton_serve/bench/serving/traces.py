"""Read public traces of requests, Azure's (`.csv`) and Mooncake's (`.jsonl`), and scale their lengths and times.

A Mooncake request has one hash for each 512 tokens of its prompt; equal hashes mean equal prefixes. Scaled lengths
preserve this exactly: each hash then stands for fewer tokens.
"""

import csv
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

MOONCAKE_HASH_TOKENS = 512
"""Prompt tokens per hash in Mooncake's traces."""


class TraceError(Exception):
    """The file is not a trace. The message names the file, the line and the expected format."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request, sent `at_s` seconds after the start of the trace. Each of `hashes` stands for `Trace.hash_tokens`
    prompt tokens, the last one for the rest. Without hashes, the prompt shares no prefix with others."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    hashes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a trace in order of time, already scaled."""

    name: str
    requests: list[TraceRequest]
    length_scale: float
    time_scale: float
    hash_tokens: int | None = None
    spread_s: float = 0.0

    @property
    def duration_s(self) -> float:
        return self.requests[-1].at_s if self.requests else 0.0

    def description(self) -> str:
        """Return one line for the output: number and rate of requests, and how they differ from the recorded trace."""
        rate = len(self.requests) / self.duration_s if self.duration_s else 0.0
        return (
            f"{self.name}: {len(self.requests)} requests in {self.duration_s:,.0f} s ({rate:.3g}/s); "
            f"lengths x {self.length_scale:g}, times x {self.time_scale:g}"
            + (f" after moving each by up to {self.spread_s:g} s" if self.spread_s else "")
            + ("" if self.hash_tokens is None else f"; {self.hash_tokens} tokens per hash")
        )


def load_trace(
    path: Path,
    *,
    count: int | None = None,
    length_scale: float = 1.0,
    time_scale: float = 1.0,
    spread_s: float = 0.0,
) -> Trace:
    """Read the first `count` requests and return them in order of time. `spread_s` delays each by a random time up to
    that many seconds, the same in every run; use it for traces with rounded times (Mooncake's: 3 s). Raises
    `TraceError`."""
    try:
        rows = list(_limited(_azure(path) if path.suffix == ".csv" else _mooncake(path), count))
    except OSError as exc:
        raise TraceError(f"cannot read {path}: {exc.strerror}") from exc
    if not rows:
        raise TraceError(f"{path} has no requests")
    has_hashes = any(row.hashes for row in rows)
    hash_tokens = max(1, round(MOONCAKE_HASH_TOKENS * length_scale)) if has_hashes else None
    start = min(row.at_s for row in rows)
    moved = random.Random(0)
    requests = [
        TraceRequest(
            at_s=(row.at_s - start + moved.uniform(0.0, spread_s)) * time_scale,
            prompt_tokens=_scaled_prompt(row, length_scale, hash_tokens),
            output_tokens=max(1, round(row.output_tokens * length_scale)),
            hashes=row.hashes,
        )
        for row in rows
    ]
    requests.sort(key=lambda request: request.at_s)
    return Trace(path.name, requests, length_scale, time_scale, hash_tokens, spread_s)


def _limited(rows: Iterator[TraceRequest], count: int | None) -> Iterator[TraceRequest]:
    for number, row in enumerate(rows):
        if count is not None and number >= count:
            return
        yield row


def _scaled_prompt(row: TraceRequest, scale: float, hash_tokens: int | None) -> int:
    """Return the scaled prompt length. Only the last, partial hash is rounded, so that shared prefixes stay aligned."""
    if hash_tokens is None or not row.hashes:
        return max(1, round(row.prompt_tokens * scale))
    whole = len(row.hashes) - 1
    rest = row.prompt_tokens - whole * MOONCAKE_HASH_TOKENS
    return whole * hash_tokens + min(hash_tokens, max(1, round(rest * scale)))


def _azure(path: Path) -> Iterator[TraceRequest]:
    with path.open(newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines), start=2):
            try:
                # The traces have seven digits after the second; Python parses at most six.
                at_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
                yield TraceRequest(at_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
            except (KeyError, TypeError, ValueError) as exc:
                raise TraceError(
                    f"{path}:{number}: expected TIMESTAMP,ContextTokens,GeneratedTokens, as in Azure's traces"
                ) from exc


def _mooncake(path: Path) -> Iterator[TraceRequest]:
    with path.open() as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                hashes = tuple(int(name) for name in row["hash_ids"])
                request = TraceRequest(
                    row["timestamp"] / 1000, int(row["input_length"]), int(row["output_length"]), hashes
                )
            except (KeyError, TypeError, ValueError) as exc:
                raise TraceError(
                    f"{path}:{number}: expected timestamp, input_length, output_length and hash_ids, as in Mooncake's"
                ) from exc
            if len(hashes) != -(-request.prompt_tokens // MOONCAKE_HASH_TOKENS):
                raise TraceError(f"{path}:{number}: {len(hashes)} hashes cannot name {request.prompt_tokens} tokens")
            yield request

"""Measure the time from the command `baton serve` until all instances are ready, and its stages.

`baton-bench ready [MODEL] [--prefill 1] [--decode 1] [--unified 0] [--turns 5] [--json]`

Values are medians over rounds. The limit is measured alternately with them: a Python process that only imports torch,
plus one read of the weights. Nothing that computes with torch can start faster. Stages are seconds since the command,
from the debug logs of the processes; of several instances the last one counts. A first round, which is not counted,
brings the weights into the page cache.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import httpx

from baton_serve.bench.ports import free_port
from baton_serve.bench.report import Row, show
from baton_serve.child_command import module_command
from baton_serve.contracts.model_path import model_folder
from baton_serve.services.local.settings import DEMO_MODEL

DEADLINE_S = 600.0
POLL_S = 0.01
READ_BYTES = 16 << 20
STAGES = {
    "start: imported": "instances begin, everything imported",
    "start: packing weights": "weights loaded",
    "start: reading the vocabulary": "weights packed",
    "start: warming up": "KV cache there",
    "start: ready": "engines warmed up",
}
"""Names of the stages in the output, by the start of the log event that begins them."""
ROUTER, JOINED = "baton_serve.services.router.cluster.readiness", "baton_serve.services.router.cluster.cluster"
"""Loggers whose events mark that the router serves and that an instance has registered."""


@dataclass(frozen=True, slots=True)
class StartupRun:
    """One start of a cluster: seconds since the command was given, until ready and until each stage."""

    ready_s: float
    stages: dict[str, float]


def stages_of(lines: Sequence[str], *, since: float) -> dict[str, float]:
    """Return the seconds of each stage from the JSON logs of the processes, in order. Log times are wall-clock times,
    as `since`; lines that are not JSON are skipped."""
    found: dict[str, float] = {}
    for line in lines:
        if not line.startswith("{"):
            continue
        entry = json.loads(line)
        stage = STAGES.get(entry["event"])
        if entry["logger"] == ROUTER and entry["event"].startswith("listening on "):
            stage = "router serves"
        elif entry["logger"] == JOINED and " is ready" in entry["event"]:
            stage = "registered"
        if stage is not None:
            found[stage] = max(found.get(stage, 0.0), entry["time"] - since)
    return dict(sorted(found.items(), key=lambda item: item[1]))


def one_turn(options: argparse.Namespace) -> StartupRun:
    """Start a cluster, wait until it is ready, stop it and return its times."""
    port = free_port()
    command = module_command("baton_serve", "serve", *filter(None, [options.model]), "--port", str(port))
    for role in ("prefill", "decode", "unified"):
        command += [f"--{role}", str(getattr(options, role))]
    command += ["--log-level", "debug", "--log-format", "json", *options.baton_args]
    count = options.prefill + options.decode + options.unified
    with TemporaryFile("w+") as log:
        since, started = time.time(), time.perf_counter()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            _wait(process, f"http://127.0.0.1:{port}/health", count, log)
            ready_s = time.perf_counter() - started
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(DEADLINE_S)
        log.seek(0)
        return StartupRun(ready_s, stages_of(log.read().splitlines(), since=since))


def _wait(process: "subprocess.Popen[bytes]", url: str, count: int, log: IO[str]) -> None:
    """Wait until the router has `count` instances. Raises `SystemExit` if the command ends or `DEADLINE_S` passes."""
    deadline = time.monotonic() + DEADLINE_S
    with httpx.Client(timeout=5.0) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                log.seek(0)
                raise SystemExit(f"baton-bench ready: baton serve ended with {process.returncode}:\n{log.read()}")
            try:
                answer = client.get(url)
                if answer.status_code == 200 and len(answer.json()["instances"]) >= count:
                    return
            except httpx.TransportError:
                pass
            time.sleep(POLL_S)
    raise SystemExit(f"baton-bench ready: not ready within {DEADLINE_S:g} s")


def import_s() -> float:
    """Return the seconds of a Python process that imports torch and ends."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - started


def read_s(folder: Path) -> float:
    """Return the seconds to read all weight files once, from the page cache, in one thread."""
    buffer = bytearray(READ_BYTES)
    started = time.perf_counter()
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - started


def rows(name: str, turns: Sequence[StartupRun], imports: Sequence[float], reads: Sequence[float]) -> Iterator[Row]:
    """Yield the medians of each stage, of readiness with its limit, and of the limit's parts."""
    limits = [a + b for a, b in zip(imports, reads, strict=True)]
    value, limit = statistics.median(turn.ready_s for turn in turns), statistics.median(limits)
    ratios = [limit / turn.ready_s for limit, turn in zip(limits, turns, strict=True)]
    ratio = statistics.median(ratios)
    first, _, third = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratio,) * 3
    for stage in turns[-1].stages:
        yield Row("ready", f"{name}: {stage}", statistics.median(turn.stages[stage] for turn in turns), "s")
    yield Row("ready", f"{name}: ready", value, "s", limit, ratio, quartiles=(first, third))
    yield Row("ready", "import torch", statistics.median(imports), "s")
    yield Row("ready", "read of the weights", statistics.median(reads), "s")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="baton-bench ready", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "model", nargs="?", default="", metavar="MODEL", help="folder of a model; default: the bundled demo model"
    )
    made.add_argument("--prefill", type=int, help="number of prefill instances (default: 1, or 0 with --unified)")
    made.add_argument("--decode", type=int, help="number of decode instances (default: 1, or 0 with --unified)")
    made.add_argument("--unified", type=int, default=0, help="number of unified instances")
    made.add_argument("--turns", type=int, default=5, help="number of measured starts")
    made.add_argument("--baton-args", type=str.split, default=[], help="more options of `baton serve`, as one string")
    made.add_argument("--json", action="store_true", help="print one JSON object per row")
    return made


def run(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    apart = 0 if options.unified else 1
    options.prefill = apart if options.prefill is None else options.prefill
    options.decode = apart if options.decode is None else options.decode
    folder = model_folder(options.model) if options.model else DEMO_MODEL
    one_turn(options)
    turns, imports, reads = [], [], []
    for _ in range(options.turns):
        imports.append(import_s())
        reads.append(read_s(folder))
        turns.append(one_turn(options))
    pools = {role: getattr(options, role) for role in ("prefill", "decode", "unified")}
    name = f"{folder.name}, " + " + ".join(f"{count} {role}" for role, count in pools.items() if count)
    show(rows(name, turns, imports, reads), as_json=options.json)

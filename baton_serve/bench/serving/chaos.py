"""Kill and freeze processes of a cluster while clients stream: each stream must end with the undisturbed text.

The cluster has three prefill and three decode instances and two routers with the demo model, and a Redis server of its
own. Every few seconds one random process receives SIGKILL, or SIGSTOP for a while. A killed process is started again,
as a supervisor would do. A stream may only fail together with its own router. At the end everything must be idle: no
request, lease or held block may be left.
"""

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from baton_serve.bench.ports import free_port
from baton_serve.bench.report import Row, show
from baton_serve.services.common.settings.configuration import environment
from baton_serve.services.local.launches import ForkLauncher, ProcessLauncher, ProgramLauncher, RunningProcess
from baton_serve.services.local.plan import Process
from baton_serve.services.local.settings import DEMO_MODEL as MODEL

BATON = "baton_serve"
LAYERS = "transformers.models.llama.modeling_llama"
"""Module that is imported before instances are forked from one process, as `baton serve` does: they start faster."""
ROLES = ("prefill",) * 3 + ("decode",) * 3
ROUTERS = 2
START_TIMEOUT_S, IDLE_TIMEOUT_S, STREAM_TIMEOUT_S = 600.0, 60.0, 120.0
WATCHED = ("vllm:num_requests_running", "vllm:num_requests_waiting", "baton:held_blocks", "baton:leases")
"""Gauges of an instance that must return to 0 when all requests have ended."""
NUM_PROMPTS = 12
NO_INSTANCE = '"code":"no_instance"'
"""Error code of a request that was refused before it began, by a router that has seen no instance yet. It is not a
failure: all instances may be starting."""
ROUTER_GRACE_S = 10.0
"""Seconds after a router was killed or resumed in which a broken stream is attributed to that router."""


@dataclass
class ClusterProcess:
    """One process of the cluster, which is restarted whenever it ends. `disturbed_at` is the time at which it was last
    killed or resumed."""

    process: Process
    launch: ProcessLauncher
    log: Path
    port: int
    launched: RunningProcess | None = None
    disturbed_at: float = -1e9
    starts: int = 0
    is_wanted: bool = True

    @property
    def name(self) -> str:
        return self.process.name

    async def run(self) -> None:
        """Start the process, wait for its end and start it again, until `is_wanted` is False."""
        while self.is_wanted:
            with self.log.open("ab") as log:
                self.launched = self.launch(self.process, environment(), log.fileno(), log.fileno())
            self.starts += 1
            await _ended(self.launched)
            self.launched = None
            await asyncio.sleep(0.5)

    @property
    def is_router(self) -> bool:
        return self.name.startswith("router")

    def send(self, number: int) -> None:
        """Send a signal if the process is running."""
        if self.launched is not None:
            self.launched.signal(number)


async def _ended(launched: RunningProcess) -> None:
    loop, is_over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(launched.fileno(), is_over.set)
    await is_over.wait()
    loop.remove_reader(launched.fileno())
    launched.wait()


@dataclass
class Tally:
    """Counts of what happened to streams; `differ` and `failed` have one line for each stream that is an error."""

    ended: int = 0
    differ: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    excused: int = 0
    """Streams that ended together with their router."""
    refused: int = 0
    """Requests that a router refused because no instance was up."""
    not_connected: int = 0
    disturbances: Counter[str] = field(default_factory=Counter)


def members(folder: Path, registry: str, *, threads: int) -> list[ClusterProcess]:
    """Return the processes of the cluster, not yet started. Instances are forked from one prepared process."""
    programs = ProgramLauncher(BATON)
    forks = ForkLauncher(BATON, programs, [LAYERS])
    forks.prepare()
    found: list[ClusterProcess] = []

    def add(launch: ProcessLauncher, name: str, port: int, argv: list[str]) -> None:
        found.append(ClusterProcess(Process(name, argv, {}), launch, folder / f"{name}.log", port))

    for number, role in enumerate(ROLES):
        name, port = f"{role}-{number}", free_port()
        argv = [role, "--model", str(MODEL), "--instance-id", name, "--registry", registry, "--device", "cpu"]
        argv += ["--dtype", "float32", "--threads", str(threads), "--http-port", str(port)]
        argv += ["--kv-cache-memory-bytes", "64M", "--max-model-len", "1024"]
        add(forks, name, port, argv)
    for number in range(ROUTERS):
        name, port = f"router-{number}", free_port()
        argv = ["router", "--model", str(MODEL), "--port", str(port), "--registry", registry]
        argv += ["--disaggregation-min-tokens", "0", "--instance-wait-s", "60", "--max-replays", "50"]
        add(programs, name, port, argv)
    return found


@asynccontextmanager
async def cluster(options: argparse.Namespace) -> AsyncIterator[list[ClusterProcess]]:
    """Start Redis and the cluster; stop all of it on exit and print the folder with the logs."""
    program = shutil.which("redis-server")
    if program is None:
        raise SystemExit("baton-bench chaos: redis-server is missing (apt install redis-server)")
    folder = Path(options.logs) if options.logs else Path(tempfile.mkdtemp(prefix="baton-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    link = f"{folder}/redis.sock"
    redis = await asyncio.create_subprocess_exec(
        *(program, "--port", "0", "--unixsocket", link, "--save", "", "--dir", str(folder)),
        stdout=asyncio.subprocess.DEVNULL,
    )
    found = members(folder, f"unix://{link}", threads=options.threads)
    tasks = [asyncio.create_task(member.run()) for member in found]
    try:
        yield found
    finally:
        for member in found:
            member.is_wanted = False
            member.send(signal.SIGCONT)
            member.send(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.gather(*tasks)
        for member in found:
            member.send(signal.SIGKILL)
        redis.terminate()
        await redis.wait()
        sys.stderr.write(f"logs: {folder}\n")


async def wait_until_complete(client: httpx.AsyncClient, found: list[ClusterProcess]) -> None:
    """Wait until each router sees all instances. Raises `SystemExit` after `START_TIMEOUT_S`."""
    deadline = time.monotonic() + START_TIMEOUT_S
    waiting = {member.name: member for member in found if member.is_router}
    while waiting:
        for name, member in list(waiting.items()):
            with contextlib.suppress(httpx.TransportError):
                health = (await client.get(f"http://127.0.0.1:{member.port}/health")).json()
                if len(health["instances"]) == len(ROLES):
                    del waiting[name]
        if waiting and time.monotonic() > deadline:
            raise SystemExit(f"baton-bench chaos: {', '.join(waiting)} did not see all instances")
        await asyncio.sleep(0.2)


def body_of(prompt: int) -> dict[str, object]:
    """Return the request body of a prompt. Half of the prompts are sampled: a replay must draw the same tokens."""
    rng = random.Random(prompt)
    ids = [5 + rng.randrange(200) for _ in range(40 + 25 * prompt)]
    heat = {"temperature": 0} if prompt % 2 else {"temperature": 0.8, "seed": prompt}
    return {"prompt": ids, "max_tokens": 120 + 30 * prompt, "ignore_eos": True, "stream": True, **heat}


async def stream(client: httpx.AsyncClient, port: int, prompt: int) -> str:
    """Return the text of a whole answer. Raises `RuntimeError` for any stream that is not complete."""
    text: list[str] = []
    url = f"http://127.0.0.1:{port}/v1/completions"
    async with asyncio.timeout(STREAM_TIMEOUT_S), client.stream("POST", url, json=body_of(prompt)) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"status {answer.status_code}: {(await answer.aread()).decode()[:200]}")
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return "".join(text)
            if line.startswith("data: "):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                text += [choice["text"] for choice in chunk["choices"]]
    raise RuntimeError("the stream ended without [DONE]")


async def keep_streaming(
    client: httpx.AsyncClient, found: list[ClusterProcess], expected: list[str], tally: Tally, until: float, seed: int
) -> None:
    """Send random prompts to random routers until `until`, and count the outcomes in `tally`."""
    rng = random.Random(seed)
    routers = [member for member in found if member.is_router]
    while time.monotonic() < until:
        router, prompt, began = rng.choice(routers), rng.randrange(NUM_PROMPTS), time.monotonic()
        try:
            text = await stream(client, router.port, prompt)
        except Exception as exc:  # noqa: BLE001 - httpx raises many types for a dying peer
            if isinstance(exc, httpx.ConnectError):
                tally.not_connected += 1
            elif NO_INSTANCE in str(exc):
                tally.refused += 1
            elif router.disturbed_at > began - ROUTER_GRACE_S:
                tally.excused += 1
            else:
                tally.failed.append(f"{router.name}, prompt {prompt}: {type(exc).__name__}: {exc}")
                sys.stderr.write(f"{time.strftime('%X')} failed: {tally.failed[-1]}\n")
            await asyncio.sleep(0.5)
            continue
        tally.ended += 1
        if text != expected[prompt]:
            tally.differ.append(f"{router.name}, prompt {prompt}: {len(text)} of {len(expected[prompt])} characters")
            sys.stderr.write(f"{time.strftime('%X')} differs: {tally.differ[-1]}\n")


async def disturb(found: list[ClusterProcess], options: argparse.Namespace, tally: Tally, until: float) -> None:
    """Kill or freeze a random process every `every_s` seconds until `until`. Half of the disturbances are kills."""
    rng = random.Random(options.seed)
    thawing: set[asyncio.Task[None]] = set()
    while time.monotonic() < until:
        await asyncio.sleep(options.every_s)
        member, frozen_s = rng.choice(found), rng.choice([0.0, 0.0, 1.0, 6.0])
        kind = "router" if member.is_router else member.name.split("-")[0]
        tally.disturbances[f"{kind} {'frozen' if frozen_s else 'killed'}"] += 1
        # A frozen process also disturbs streams that begin while it is frozen: count from its end.
        member.disturbed_at = time.monotonic() + frozen_s
        if frozen_s:
            member.send(signal.SIGSTOP)
            thawing.add(asyncio.create_task(_thaw(member, frozen_s)))
        else:
            member.send(signal.SIGKILL)
    await asyncio.gather(*thawing)


async def _thaw(member: ClusterProcess, after_s: float) -> None:
    await asyncio.sleep(after_s)
    member.send(signal.SIGCONT)


async def leaks(client: httpx.AsyncClient, found: list[ClusterProcess]) -> list[str]:
    """Return one line for each gauge that is not back to its idle value after at most `IDLE_TIMEOUT_S`."""
    deadline, left = time.monotonic() + IDLE_TIMEOUT_S, ["not looked at"]
    while left and time.monotonic() < deadline:
        left = []
        for member in found:
            text = (await client.get(f"http://127.0.0.1:{member.port}/metrics")).text
            values: Counter[str] = Counter()
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    values[sample.name] += int(sample.value)
            names = ("baton:requests_in_flight", "baton:router_waiting_requests") if member.is_router else WATCHED
            left += [f"{member.name} {name}={values[name]}" for name in names if values[name]]
            if not member.is_router and values["baton:free_blocks"] != values["baton:total_blocks"]:
                left.append(f"{member.name} free blocks {values['baton:free_blocks']}/{values['baton:total_blocks']}")
        await asyncio.sleep(0.5)
    return left


async def bench(options: argparse.Namespace) -> tuple[list[Row], bool]:
    tally = Tally()
    # No connection is reused: one that was idle while its router was killed would fail an innocent request.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with cluster(options) as found, httpx.AsyncClient(timeout=STREAM_TIMEOUT_S, limits=limits) as client:
        await wait_until_complete(client, found)
        port = next(member.port for member in found if member.is_router)
        # The expected texts come from the same cluster before the first disturbance.
        expected = [await stream(client, port, prompt) for prompt in range(NUM_PROMPTS)]
        until = time.monotonic() + options.minutes * 60
        jobs = [
            keep_streaming(client, found, expected, tally, until, seed=options.seed * 1000 + i)
            for i in range(options.streams)
        ]
        await asyncio.gather(disturb(found, options, tally, until), *jobs)
        await wait_until_complete(client, found)
        left = await leaks(client, found)
    for line in left:
        sys.stderr.write(f"left: {line}\n")
    case = f"{options.minutes:g} min, {options.streams} streams"
    rows = [
        Row("chaos", f"{case}: {what}", float(count), "times") for what, count in sorted(tally.disturbances.items())
    ]
    rows += [
        Row("chaos", f"{case}: ended equal", float(tally.ended - len(tally.differ)), "streams"),
        Row("chaos", f"{case}: ended different", float(len(tally.differ)), "streams", 0.0),
        Row("chaos", f"{case}: failed although their router was up", float(len(tally.failed)), "streams", 0.0),
        Row("chaos", f"{case}: ended with their router", float(tally.excused), "streams"),
        Row("chaos", f"{case}: refused, no instance was up", float(tally.refused), "times"),
        Row("chaos", f"{case}: found no router listening", float(tally.not_connected), "times"),
        Row("chaos", f"{case}: left behind", float(len(left)), "requests, leases, blocks", 0.0),
    ]
    return rows, not (tally.differ or tally.failed or left)


def run(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="baton-bench chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="duration of the test in minutes")
    parser.add_argument("--streams", type=int, default=20, help="number of concurrent streams")
    parser.add_argument("--every-s", type=float, default=5.0, help="seconds between two disturbances")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random choices")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each instance")
    parser.add_argument(
        "--logs", default="", help="folder for the logs of the processes (default: a new temporary folder)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per row")
    options = parser.parse_args(arguments)
    rows, is_sound = uvloop.run(bench(options))
    show(rows, as_json=options.json)
    sys.exit(0 if is_sound else 1)

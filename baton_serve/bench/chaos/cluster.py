"""The processes that `baton-bench chaos` disturbs: three prefill and three decode instances, two routers, and Redis.

A process that ends is started again, as a supervisor would do. All serve the demo model with one LoRA adapter; the
routers accept two API keys, one of the honest clients and one of the hostile client.
"""

import argparse
import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from baton_serve.bench.chaos.adapter import RANK, write_adapter
from baton_serve.bench.ports import free_port
from baton_serve.services.common.settings.configuration import environment
from baton_serve.services.local.cluster_supervisor import MODULE
from baton_serve.services.local.launches import ForkLauncher, ProcessLauncher, ProgramLauncher, RunningProcess
from baton_serve.services.local.plan import Process
from baton_serve.services.local.settings import DEMO_MODEL as MODEL

LAYERS = "transformers.models.llama.modeling_llama"
"""Module that is imported before instances are forked from one process, as `baton serve` does: they start faster."""
ROLES = ("prefill",) * 3 + ("decode",) * 3
NUM_ROUTERS = 2
ADAPTER = "poet"
"""Name of the LoRA adapter in requests."""
HONEST_KEY, HOSTILE_KEY = "honest-key-of-chaos", "hostile-key-of-chaos"
KEYS = f"{HONEST_KEY} name=honest\n{HOSTILE_KEY} name=hostile requests_per_minute=120 tokens_per_minute=100000\n"
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
RESTART_DELAY_S = 0.5


@dataclass
class ClusterProcess:
    """One process of the cluster, which is restarted whenever it ends. `disturbed_at` is the time at which it was last
    killed or resumed."""

    process: Process
    launch: ProcessLauncher
    log: Path
    port: int
    """Port of its HTTP server."""
    message_ports: Sequence[int] = ()
    """Ports of its ZeroMQ sockets."""
    may_be_killed: bool = True
    """False for the first process of each role. It is only frozen, so that it lives as long as the test: its memory and
    descriptors show what accumulates."""
    launched: RunningProcess | None = None
    disturbed_at: float = -1e9
    starts: int = 0
    is_wanted: bool = True

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def is_router(self) -> bool:
        return self.name.startswith("router")

    async def run(self) -> None:
        """Start the process, wait for its end and start it again, until `is_wanted` is False."""
        while self.is_wanted:
            with self.log.open("ab") as log:
                self.launched = self.launch(self.process, environment(), log.fileno(), log.fileno())
            self.starts += 1
            await _ended(self.launched)
            self.launched = None
            await asyncio.sleep(RESTART_DELAY_S)

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


@dataclass(slots=True)
class ChaosCluster:
    """The processes, and the folder with their logs. `redis_pid` is the process id of the registry."""

    folder: Path
    processes: list[ClusterProcess]
    redis_pid: int
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def routers(self) -> list[ClusterProcess]:
        return [process for process in self.processes if process.is_router]

    @property
    def instances(self) -> list[ClusterProcess]:
        return [process for process in self.processes if not process.is_router]

    async def wait_until_complete(self, client: httpx.AsyncClient) -> None:
        """Wait until each router sees all instances. Raises `SystemExit` after `START_TIMEOUT_S`."""
        deadline = time.monotonic() + START_TIMEOUT_S
        waiting = {router.name: router for router in self.routers}
        while waiting:
            for name, router in list(waiting.items()):
                with contextlib.suppress(httpx.TransportError):
                    health = (await client.get(f"http://127.0.0.1:{router.port}/health")).json()
                    if len(health["instances"]) == len(ROLES):
                        del waiting[name]
            if waiting and time.monotonic() > deadline:
                raise SystemExit(f"baton-bench chaos: {', '.join(waiting)} did not see all instances")
            await asyncio.sleep(0.2)

    async def stop(self) -> None:
        """Stop all processes. After `STOP_TIMEOUT_S` kill each that still runs."""
        for process in self.processes:
            process.is_wanted = False
            process.send(signal.SIGCONT)
            process.send(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await asyncio.gather(*self.tasks)
        for process in self.processes:
            process.send(signal.SIGKILL)


def make_processes(folder: Path, registry: str, *, threads: int) -> list[ClusterProcess]:
    """Return the processes of the cluster, not yet started. Instances are forked from one prepared process."""
    programs = ProgramLauncher(MODULE)
    forks = ForkLauncher(MODULE, programs, [LAYERS])
    forks.prepare()
    adapter = write_adapter(folder / ADAPTER, MODEL)
    keys = folder / "keys"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    found: list[ClusterProcess] = []
    for number, role in enumerate(ROLES):
        name, ports = f"{role}-{number}", [free_port() for _ in range(4)]
        argv = [role, "--model", str(MODEL), "--instance-id", name, "--registry", registry, "--device", "cpu"]
        argv += ["--dtype", "float32", "--threads", str(threads), "--http-port", str(ports[0])]
        argv += ["--rpc-port", str(ports[1]), "--transfer-port", str(ports[2]), "--events-port", str(ports[3])]
        argv += ["--kv-cache-memory-bytes", "64M", "--max-model-len", "1024"]
        argv += ["--enable-lora", "--max-lora-rank", str(RANK), "--lora-modules", f"{ADAPTER}={adapter}"]
        found.append(_process(folder, forks, name, ports, argv, may_be_killed=role in ROLES[:number]))
    for number in range(NUM_ROUTERS):
        name, port = f"router-{number}", free_port()
        argv = ["router", "--model", str(MODEL), "--port", str(port), "--registry", registry]
        argv += ["--disaggregation-min-tokens", "0", "--instance-wait-s", "60", "--max-replays", "50"]
        argv += ["--api-key-file", str(keys), "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        found.append(_process(folder, programs, name, [port], argv, may_be_killed=number > 0))
    return found


def _process(
    folder: Path, launch: ProcessLauncher, name: str, ports: Sequence[int], argv: list[str], *, may_be_killed: bool
) -> ClusterProcess:
    log = folder / f"{name}.log"
    return ClusterProcess(Process(name, argv, {}), launch, log, ports[0], ports[1:], may_be_killed)


def _new_folder(path: str) -> Path:
    """Return the folder for logs as an absolute path: the URL of the registry's socket needs one."""
    folder = Path(path).absolute() if path else Path(tempfile.mkdtemp(prefix="baton-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@asynccontextmanager
async def running_cluster(options: argparse.Namespace) -> AsyncIterator[ChaosCluster]:
    """Start Redis and the cluster; stop all of it on exit and print the folder with the logs."""
    program = shutil.which("redis-server")
    if program is None:
        raise SystemExit("baton-bench chaos: redis-server is missing (apt install redis-server)")
    folder = _new_folder(options.logs)
    link = folder / "redis.sock"
    redis = await asyncio.create_subprocess_exec(
        *(program, "--port", "0", "--unixsocket", str(link), "--save", "", "--dir", str(folder)),
        stdout=asyncio.subprocess.DEVNULL,
    )
    cluster = ChaosCluster(folder, make_processes(folder, f"unix://{link}", threads=options.threads), redis.pid)
    cluster.tasks = [asyncio.create_task(process.run()) for process in cluster.processes]
    try:
        yield cluster
    finally:
        await cluster.stop()
        redis.terminate()
        await redis.wait()
        sys.stderr.write(f"logs: {folder}\n")

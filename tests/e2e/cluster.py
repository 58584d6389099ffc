"""Real processes on real sockets: a `baton serve` of one's own, its logs, its health and its metrics.

Waiting is always for a fact (a health answer, a metric), with a deadline; nothing sleeps and hopes.
"""

import contextlib
import json
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from baton_serve.bench.ports import free_port
from baton_serve.child_command import module_command
from baton_serve.services.local.launches import ProcessLauncher
from baton_serve.services.local.plan import Process
from tests.devices import DEVICE
from tests.forking import forks

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 180.0


def wait_until(fact: Callable[[], bool], *, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not fact():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s: {what}")
        time.sleep(0.05)


def baton(*args: str) -> list[str]:
    return module_command("baton_serve", *args)


def environment() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("BATON__")}
    path = os.pathsep.join(filter(None, (str(ROOT), clean.get("PYTHONPATH"))))
    return clean | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True, slots=True)
class Ended:
    """Exit code and output of a command that has ended."""

    returncode: int
    stdout: str
    stderr: str


def run_baton(*args: str, timeout_s: float = 200.0) -> Ended:
    """Runs `baton ARGS`, forked, until it ends by itself."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
        process = forks()(Process(args[0], list(args), {}), environment(), out.fileno(), error.fileno())
        has_ended = bool(select.select([process], [], [], timeout_s)[0])
        process.signal(signal.SIGKILL)
        status = process.wait()
        out.seek(0)
        error.seek(0)
        assert has_ended, f"baton {args[0]} did not end within {timeout_s} s: {error.read()}"
        return Ended(status, out.read(), error.read())


class Api:
    """A router's address and what tests ask of it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.client = httpx.Client(base_url=self.url, timeout=120.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()

    def metrics(self, address: str | None = None) -> dict[str, float]:
        """Sum of each sample name over its labels; of the router, or of the instance at `address`."""
        where = address or self.url.removeprefix("http://")
        text = httpx.get(f"http://{where}/metrics", verify=False, timeout=60.0).text
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    def complete(self, prompt: str | list[int] | list[list[int]], **params: Any) -> dict[str, Any]:
        """POST /v1/completions, not streamed; raises on an error status."""
        answer = self.client.post("/v1/completions", json={"prompt": prompt, **params})
        if answer.status_code != 200:
            raise AssertionError(f"{answer.status_code}: {answer.text}")
        return dict(answer.json())

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            if answer.status_code != 200:
                raise AssertionError(f"{answer.status_code}: {answer.read().decode()}")
            rest = b""
            for data in answer.iter_bytes():  # httpx also breaks lines where JSON need not escape, as at U+2028
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: ") and line != b"data: [DONE]":
                        yield json.loads(line.removeprefix(b"data: "))


class Cluster(Api):
    """`with Cluster(model, prefill=1, decode=1) as cluster: cluster.client.post(...)`. Ends all processes on exit."""

    def __init__(
        self,
        model: Path | str | None,
        *,
        prefill: int = 1,
        decode: int = 1,
        unified: int = 0,
        encode: int = 0,
        args: tuple[str, ...] = (),
        launch: ProcessLauncher | None = None,
    ) -> None:
        """`launch`: how its first process starts; else it is forked from one that has imported what it needs."""
        self.port = free_port()
        super().__init__(f"http://127.0.0.1:{self.port}")
        argv = ["serve", *([str(model)] if model else []), "--port", str(self.port), "--device", DEVICE]
        argv += ["--prefill", str(prefill), "--decode", str(decode), "--unified", str(unified)]
        argv += ["--encode", str(encode), *args]
        self._serve = Process("serve", argv, {})
        self._status: int | None = None
        self._launch = launch or forks()
        self._size = prefill + decode + unified + encode
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in __exit__

    def __enter__(self) -> Self:
        self._process = self._launch(self._serve, environment(), self._log.fileno(), self._log.fileno())
        try:
            wait_until(self._is_complete, timeout_s=START_TIMEOUT_S, what="a cluster that serves")
        except BaseException:
            self.stop()
            print(self.log())  # noqa: T201 - pytest shows it with the failure
            self._log.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if kind is not None:
            print(self.log())  # noqa: T201 - pytest shows it with the failure
        self._log.close()

    def stop(self) -> int:
        """Ends the cluster as Ctrl-C does. Returns the exit status."""
        self.client.close()
        if self._status is None:
            self._process.signal(signal.SIGINT)
            is_in_time = self._has_ended(within_s=30.0)
            self._process.signal(signal.SIGKILL)
            self._status = self._process.wait()
            assert is_in_time, "baton serve did not end within 30 s"
        return self._status

    @property
    def serve_pid(self) -> int:
        return self._process.pid

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def _is_complete(self) -> bool:
        if self._has_ended():
            raise RuntimeError("baton serve has ended")
        with contextlib.suppress(httpx.TransportError):
            answer = self.client.get("/health")
            return answer.status_code == 200 and sum(answer.json()["pools"].values()) == self._size
        return False

    def _has_ended(self, within_s: float = 0.0) -> bool:
        return bool(select.select([self._process], [], [], within_s)[0])

    def health(self) -> dict[str, Any]:
        return dict(self.client.get("/health").json())

    def instances(self, role: str | None = None) -> list[dict[str, Any]]:
        return [i for i in self.health()["instances"] if role in (None, i["role"])]

    def pid(self, role: str, index: int = 0) -> int:
        """Process id of one instance, from its own /health."""
        address = self.instances(role)[index]["http_address"]
        return int(httpx.get(f"http://{address}/health").json()["pid"])

    def wait_idle(self, timeout_s: float = 15.0) -> None:
        """Wait until no instance runs, waits for or holds anything. A leak would keep it from returning."""
        wait_until(lambda: not self.busy(), timeout_s=timeout_s, what=f"an idle cluster, but {self.busy()}")

    def busy(self) -> dict[str, float]:
        """Return the gauges that are not idle, by instance and metric; empty if everything is idle."""
        found: dict[str, float] = {}
        watched = ("vllm:num_requests_running", "vllm:num_requests_waiting", "baton:held_blocks", "baton:leases")
        for instance in self.instances():
            try:
                metrics = self.metrics(instance["http_address"])
            except httpx.TransportError:  # it has ended, and the router will soon notice
                found[f"{instance['instance']} is gone"] = 1.0
                continue
            found |= {f"{instance['instance']} {name}": metrics[name] for name in watched if metrics[name]}
        router = self.metrics()
        found |= {f"router {name}": router[name] for name in watched[:2] if router.get(name)}
        return found

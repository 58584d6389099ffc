"""A release as processes of this machine, each with the environment that Kubernetes would give its container.

Kubernetes is emulated only where a pod differs from a process: its own address (127.X.Y.2, .3, …: the ports stay those
of the chart), the folder of the model, and the names that DNS would resolve. Probes ask what they ask in a cluster.
"""

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from random import SystemRandom

import httpx
import pytest

from baton_serve.bench.ports import free_port
from baton_serve.services.local.launches import RunningProcess
from baton_serve.services.local.plan import Process
from tests.e2e.cluster import ROOT, environment, wait_until
from tests.forking import forks
from tests.helm.chart import Manifest, container_of, environment_of, named, objects

SECRETS = {"REDIS_PASSWORD": "hush", "API_KEYS": "sk-test\n", "CLUSTER_KEY": "k" * 64}
_NETWORK = f"127.{SystemRandom().randrange(1, 255)}.{SystemRandom().randrange(256)}"
"""Of this run's pods alone: another run on the machine has the same ports."""
ADDRESSES = {role: f"{_NETWORK}.{n}" for n, role in enumerate(("router", "prefill", "decode", "unified"), start=2)}
OTHER = "other-unified"
"""A pool of the second model, of releases that have one."""
POD_ADDRESSES = {**ADDRESSES, OTHER: f"{_NETWORK}.{len(ADDRESSES) + 2}"}
VALUES: Manifest = {
    "model": {"servedName": ["tiny"], "source": {"kind": "hostPath", "hostPath": {"path": "/srv/models/tiny"}}},
    "gpu": {"resourceName": "", "device": "cpu"},
    "engine": {"dtype": "float32", "threads": 1, "kvCacheMemoryBytes": "8M", "maxNumSeqs": 8},
    "unified": {"replicas": 1},
    "kvTransfer": {"usm": {"enabled": True}},
    "auth": {"encryptPods": True},
    "router": {"settings": {"disaggregationMinTokens": 0}},
    "monitoring": {"prometheusRule": {"enabled": True}},
}


class _Fork:
    """Implements the part of `subprocess.Popen` that `Pods` uses."""

    def __init__(self, process: RunningProcess) -> None:
        self.returncode: int | None = None
        self._process = process

    def poll(self) -> int | None:
        if select.select([self._process], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not select.select([self._process], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a forked pod", timeout or 0.0)
        self.returncode = self._process.wait()
        return self.returncode

    def send_signal(self, number: int) -> None:
        self._process.signal(number)

    def kill(self) -> None:
        self._process.signal(signal.SIGKILL)


class Pods:
    """The pods of a release as processes of this machine. `other` is the folder of a second model, whose mount is
    /models/other. With `are_forked`, containers are forks of the tests' server, and not programs, each of which imports
    torch and transformers.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        values: Manifest = VALUES,
        *,
        other: Path | None = None,
        are_forked: bool = False,
    ) -> None:
        self.rendered = objects(values)
        self._other = other
        self._are_forked = are_forked
        self.folder = folder
        self._model = model
        self._redis_port = free_port()
        self._processes: dict[str, subprocess.Popen[bytes] | _Fork] = {}
        for key in ("API_KEYS", "CLUSTER_KEY"):
            (folder / key).write_text(SECRETS[key])
        (folder / "run").mkdir()

    def environment(self, role: str) -> dict[str, str]:
        fields = {"metadata.name": f"{role}-0", "status.podIP": POD_ADDRESSES[role]}
        container = container_of(self._pod(role))
        given = environment_of(self.rendered, container, secrets=SECRETS, fields=fields)
        given.pop("HOME", None)  # a pod compiles its kernels; here they are in this user's cache
        return {name: self._localised(role, value) for name, value in given.items()}

    def _localised(self, role: str, value: str) -> str:
        """Paths of mounts, names of Services and the pod's own address, as they are on this machine."""
        replaced = {
            "/models/model": str(self._model),
            "/models/other": str(self._other),
            "/run/secrets/baton": str(self.folder),
            "/run/secrets/cluster": str(self.folder),
            "/run/baton": str(self.folder / "run"),
            "test-baton-redis:6379": f"127.0.0.1:{self._redis_port}",
            "0.0.0.0": POD_ADDRESSES[role],
        }
        for there, here in replaced.items():
            value = value.replace(there, here)
        return value

    def _pod(self, role: str) -> Manifest:
        return dict(named(self.rendered, "Deployment", f"test-baton-{role}")["spec"]["template"]["spec"])

    def start(self, role: str) -> None:
        arguments, environ = container_of(self._pod(role))["args"], environment() | self.environment(role)
        if not self._are_forked:
            self._spawn(role, [sys.executable, "-m", "baton_serve", *arguments], environ)
            return
        with (self.folder / f"{role}.log").open("wb") as log:
            process = forks()(Process(role, arguments, {}), environ, log.fileno(), log.fileno())
        self._processes[role] = _Fork(process)

    def start_redis(self) -> None:
        if shutil.which("redis-server") is None:
            pytest.skip("needs the program redis-server")
        container = named(self.rendered, "StatefulSet", "-redis")["spec"]["template"]["spec"]["containers"][0]
        command = [*container["command"]]
        command[-1] = command[-1].replace("redis-server ", f"redis-server --port {self._redis_port} --bind 127.0.0.1 ")
        environ = environment_of(self.rendered, container, secrets=SECRETS, fields={})
        self._spawn("redis", command, {"PATH": os.environ["PATH"], **environ})
        wait_until(lambda: can_connect(self._redis_port), timeout_s=10, what="Redis")

    def redis_probe(self) -> int:
        container = named(self.rendered, "StatefulSet", "-redis")["spec"]["template"]["spec"]["containers"][0]
        command = container["readinessProbe"]["exec"]["command"]
        command = [word.replace("redis-cli ", f"redis-cli -p {self._redis_port} ") for word in command]
        environ = {"PATH": os.environ["PATH"], "REDIS_PASSWORD": SECRETS["REDIS_PASSWORD"]}
        return subprocess.run(command, env=environ, check=False).returncode

    def probe(self, role: str, probe: str) -> int:
        """Status of a probe's request; 0 without an answer."""
        container = container_of(self._pod(role))
        target = container[probe]["httpGet"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://{POD_ADDRESSES[role]}:{ports[target['port']]}{target['path']}").status_code
        return 0

    def is_up(self, role: str, probe: str = "readinessProbe") -> bool:
        process = self._processes[role]
        assert process.poll() is None, f"{role} ended with status {process.returncode}:\n{self.log(role)}"
        return self.probe(role, probe) == 200

    def pre_stop(self, role: str) -> int:
        """Status of what runs in the container before SIGTERM."""
        command = container_of(self._pod(role))["lifecycle"]["preStop"]["exec"]["command"]
        assert command[0] == "baton"
        words = [word.replace("127.0.0.1", POD_ADDRESSES[role]) for word in command[1:]]
        environ = environment() | self.environment(role)
        return subprocess.run([sys.executable, "-m", "baton_serve", *words], env=environ, check=False).returncode

    def stop(self, role: str) -> int:
        """SIGTERM. Returns the exit status."""
        process = self._processes.pop(role)
        process.send_signal(signal.SIGTERM)
        return process.wait(20)

    def kill_all(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def log(self, role: str) -> str:
        return (self.folder / f"{role}.log").read_text()

    def _spawn(self, name: str, command: list[str], environ: dict[str, str]) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log)


def can_connect(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0

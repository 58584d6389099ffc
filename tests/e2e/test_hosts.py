"""An instance on two hosts, which are network namespaces: one is lost without a sign, and the instance forms again."""

import contextlib
import select
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from baton_serve.bench.ports import free_port
from baton_serve.services.local.launches import RunningProcess
from baton_serve.services.local.plan import Process
from tests.e2e.cluster import Api, environment, wait_until
from tests.e2e.network_host import NetworkHost, lacks, network_host
from tests.e2e.test_equality import expected_tokens, prompt_of, served_tokens
from tests.e2e.test_faults import stream_in_thread
from tests.forking import forks
from tests.tiny_models import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(reason := lacks()), reason=reason)]

START_TIMEOUT_S = 60.0
LONG = 400
"""Tokens of a stream that is still running when the other host is lost."""
RANK = "baton_serve.services.instance.nodes.remote_rank"


class TwoHosts(Api):
    """A router, `unified-0` with one rank on each of two hosts, and `unified-1`, to which streams can go."""

    def __init__(self, model: Path, key: Path, host: NetworkHost, log: Any) -> None:
        port, registry = free_port(), free_port()
        super().__init__(f"http://127.0.0.1:{port}")
        self.host, self._log = host, log
        self.scratch = key.parent / "scratch"
        """The folder for temporary files of all processes."""
        self.scratch.mkdir()
        self._processes: dict[str, RunningProcess] = {}
        common = ["--model", str(model), "--registry", f"memory://127.0.0.1:{registry}"]
        common += ["--cluster-key-file", str(key)]
        worker = [*common, "--device", "cpu", "--dtype", "float32", "--threads", "1", "--block-size", "16"]
        worker += ["--kv-cache-memory-bytes", str(8 << 20), "--max-num-seqs", "16"]
        hosts = ["--instance-id", "unified-0", "--tensor-parallel-size", "2", "--nnodes", "2"]
        hosts += ["--master-addr", host.own, "--master-port", str(free_port())]
        self._argv = {
            "router": ["router", *common, "--port", str(port)],
            "unified-1": ["unified", *worker, "--instance-id", "unified-1"],
            "node-0": ["unified", *worker, *hosts],
            "node-1": host.argv("unified", *worker, *hosts, "--node-rank", "1"),
        }

    def start(self, *names: str) -> None:
        for name in names:
            process = Process(name, self._argv[name], {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.scratch)})
            self._processes[name] = forks()(process, environment(), self._log.fileno(), self._log.fileno())

    def kill(self, *names: str) -> None:
        for name in names or list(self._processes):
            self._processes[name].signal(signal.SIGKILL)
            self._processes.pop(name).wait()

    def status(self, name: str, within_s: float) -> int:
        """Wait until a process has ended by itself, and return its status."""
        assert select.select([self._processes[name]], [], [], within_s)[0], f"{name} has not ended within {within_s} s"
        return self._processes.pop(name).wait()

    def instances(self) -> dict[str, dict[str, Any]]:
        """Return the instances that are connected to the router, by name."""
        try:
            return {one["instance"]: one for one in self.client.get("/health").json()["instances"]}
        except httpx.TransportError:
            return {}

    def wait_for(self, *names: str) -> None:
        wait_until(lambda: set(names) == set(self.instances()), timeout_s=START_TIMEOUT_S, what=f"only {names}")

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of ranks on the other host."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if RANK in process.cmdline():
                    found.append(process)
        return found

    def log(self) -> str:
        self._log.seek(0)
        return str(self._log.read())


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    write_tiny_model(tmp_path / "model")
    key = tmp_path / "key"
    key.write_text("0123456789abcdef" * 4)
    with network_host() as host, tempfile.TemporaryFile("w+") as log:
        hosts = TwoHosts(tmp_path / "model", key, host, log)
        try:
            yield hosts
        finally:
            hosts.kill()
            hosts.client.close()
            print(hosts.log())  # noqa: T201 - pytest shows it with a failure


def tokens_of(chunks: list[dict[str, Any]]) -> list[int]:
    choices = [chunk["choices"][0] for chunk in chunks if chunk.get("choices")]
    return [
        int(name.removeprefix("token_id:")) for one in choices for name in (one["logprobs"] or {}).get("tokens", [])
    ]


def test_two_hosts_serve_and_the_loss_of_one_is_survived(hosts: TwoHosts, tmp_path: Path) -> None:
    hosts.start("router", "unified-1", "node-0", "node-1")
    hosts.wait_for("unified-0", "unified-1")
    (rank,) = hosts.ranks()

    # Streams run on both instances. Then the other host falls silent, without an end of its connections.
    model, prompts = tmp_path / "model", [prompt_of(40, start=start) for start in range(4)]
    body = {"max_tokens": LONG, "temperature": 0, "ignore_eos": True, "logprobs": 0, "return_tokens_as_token_ids": True}
    streams = [stream_in_thread(hosts, body | {"prompt": prompt}) for prompt in prompts]
    wait_until(lambda: bool(hosts.instances()["unified-0"]["running"]), timeout_s=10, what="a stream on two hosts")
    hosts.host.unplug()
    for (thread, chunks, errors), prompt in zip(streams, prompts, strict=True):
        thread.join(40)
        assert not thread.is_alive() and not errors
        assert tokens_of(chunks) == expected_tokens(model, prompt, LONG)
    assert hosts.metrics()["baton:replays_total"] >= 1
    assert hosts.status("node-0", within_s=20) == 1
    assert "rank 1 of 2 on node 1 is lost" in hosts.log()

    # A supervisor starts the first host again. It waits for the other one, whose process has started a new rank.
    hosts.start("node-0")
    wait_until(lambda: "for --node-rank 1 of --nnodes 2 (ranks 1)" in hosts.log(), timeout_s=20, what="a message")
    hosts.host.plug_in()
    hosts.wait_for("unified-0", "unified-1")
    assert rank not in hosts.ranks()
    hosts.kill("unified-1")
    hosts.wait_for("unified-0")
    assert served_tokens(hosts, prompts[0][::-1], 12) == expected_tokens(model, prompts[0][::-1], 12)

    # A host whose processes are killed is noticed at once, and nothing of it is left.
    hosts.kill("node-1")
    assert hosts.status("node-0", within_s=5) == 1
    wait_until(lambda: not hosts.ranks(), timeout_s=5, what="the end of all ranks")
    assert list(hosts.scratch.iterdir()) == []

"""An upgrade on defaults, on processes: one prefill and one decode instance restart while clients send requests.

The script of the chart decides the order. The controller of Deployments is emulated: it ends the pod of a Deployment
whose rollout is not paused, as the kubelet does, and starts the next one when clients have got answers without it.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.cluster import wait_until
from tests.helm.chart import Manifest, of_kind
from tests.helm.pods import ADDRESSES, VALUES, Pods
from tests.helm.releases import SCRIPT, container_environment
from tests.tiny_models import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.redis]

START_TIMEOUT_S = 180.0
GAP_TIMEOUT_S = 60.0
URL = f"http://{ADDRESSES['router']}:8000"
HEADERS = {"authorization": "Bearer sk-test"}
ROLES = ("prefill", "decode")
NUM_CLIENTS = 3
ANSWERS_IN_A_GAP = 4
"""Answers to requests that were sent while a pool had no instance, before its next one starts."""


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    folder = tmp_path_factory.mktemp("pods")
    values = {**VALUES, "unified": {"replicas": 0}}
    pods = Pods(folder, write_tiny_model(folder / "model"), values, are_forked=True)
    try:
        pods.start_redis()
        for role in ("router", *ROLES):
            pods.start(role)
        wait_until(lambda: pods.is_up("router", "startupProbe"), timeout_s=START_TIMEOUT_S, what="the router")
        wait_until(lambda: all(map(pods.is_up, ROLES)), timeout_s=START_TIMEOUT_S, what="the instances")
        wait_until(
            lambda: pools() == {"prefill": 1, "decode": 1, "unified": 0}, timeout_s=30, what="both in the router"
        )
        yield pods
    finally:
        pods.kill_all()


def pools() -> Manifest:
    return dict(httpx.get(f"{URL}/health").json()["pools"])


class Clients:
    """Send requests without a pause, and keep every answer that differs from the first."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.num_answers = 0
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(NUM_CLIENTS)]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(90)
        assert not any(thread.is_alive() for thread in self._threads)

    def wait_for_new_answers(self) -> None:
        """Wait for answers to requests that are sent from now on: each client may have one that was sent before."""
        enough = self.num_answers + NUM_CLIENTS + ANSWERS_IN_A_GAP
        wait_until(lambda: self.num_answers >= enough, timeout_s=GAP_TIMEOUT_S, what="answers without a pool")

    def _ask(self, number: int) -> None:
        prompt = f"{number} the owl and the ring and a prompt of some length " * 4
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        expected: str | None = None
        with httpx.Client(base_url=URL, headers=HEADERS, timeout=60) as client:
            while not self._over.is_set():
                answer = client.post("/v1/completions", json=body)
                text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
                expected = expected or text
                with self._lock:
                    self.num_answers += 1
                    if answer.status_code != 200 or text != expected:
                        self.wrong.append(f"{answer.status_code}: {text}")


class Controller:
    """The Deployments of the pools. `history` has the pools of the router's view whenever one was empty."""

    def __init__(self, pods: Pods, clients: Clients) -> None:
        self.history: list[Manifest] = []
        self._pods = pods
        self._clients = clients
        self._specs: dict[str, Manifest] = {role: {"replicas": 1} for role in ROLES}
        self._annotations: dict[str, dict[str, str]] = {role: {} for role in ROLES}
        self._rollouts: dict[str, Future[None]] = {}
        self._executor = ThreadPoolExecutor(len(ROLES))

    def upgrade(self) -> None:
        """Do what follows a new template: begin the rollout of every Deployment that is not paused."""
        for role in ROLES:
            if not self._specs[role].get("paused") and role not in self._rollouts:
                self._rollouts[role] = self._executor.submit(self._restart, role)

    def get(self, name: str) -> Manifest:
        role = name.removeprefix("test-baton-")
        rollout = self._rollouts.get(role)
        if rollout is not None and rollout.done():
            rollout.result()
        is_new = rollout is not None and rollout.done()
        status = {"observedGeneration": 2, "replicas": 1, "updatedReplicas": int(is_new), "availableReplicas": 1}
        metadata = {"name": name, "generation": 2, "annotations": self._annotations[role]}
        return {"metadata": metadata, "spec": self._specs[role], "status": status}

    def apply(self, name: str, manager: str, *, annotations: dict[str, str], spec: Manifest) -> None:
        role = name.removeprefix("test-baton-")
        self._annotations[role] |= annotations
        self._specs[role] |= spec
        if spec.get("paused") is False:
            self.upgrade()

    def close(self) -> None:
        self._executor.shutdown()

    def _restart(self, role: str) -> None:
        assert self._pods.pre_stop(role) == 0
        assert self._pods.stop(role) == 0
        self.history.append(pools())
        self._clients.wait_for_new_answers()
        self._pods.start(role)
        wait_until(lambda: self._pods.is_up(role), timeout_s=START_TIMEOUT_S, what=f"the new {role}")
        wait_until(lambda: pools()[role] == 1, timeout_s=30, what=f"the new {role} in the router")


def test_an_upgrade_on_defaults_fails_no_request(pods: Pods) -> None:
    (job,) = [job for job in of_kind(pods.rendered, "Job") if "-rollout-" in job["metadata"]["name"]]
    environ = container_environment(job)
    order = [["test-baton-prefill", "test-baton-decode"]]
    with Clients() as clients:
        controller = Controller(pods, clients)
        try:
            wait_until(lambda: clients.num_answers > NUM_CLIENTS, timeout_s=60, what="answers before the upgrade")
            SCRIPT["pause"](controller, order, environ["ROLLOUT"])
            controller.upgrade()
            poll = threading.Event()
            SCRIPT["roll"](controller, order, environ["ROLLOUT"], sleep=lambda _: poll.wait(0.2))
            clients.wait_for_new_answers()
        finally:
            controller.close()
    assert clients.wrong == []
    assert controller.history == [
        {"prefill": 0, "decode": 1, "unified": 0},
        {"prefill": 1, "decode": 0, "unified": 0},
    ]

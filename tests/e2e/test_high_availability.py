"""Two routers with a Redis that fails in many ways while clients stream: they continue with the last view of the
cluster.
"""

import contextlib
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton_serve.bench.ports import free_port
from tests.contract.redis_server import RedisServer
from tests.e2e.cluster import ROOT, Api, baton, environment, wait_until
from tests.e2e.test_faults import text_of

pytestmark = [pytest.mark.slow, pytest.mark.redis]

BODY: dict[str, Any] = {"prompt": [7, 8, 9] * 30, "max_tokens": 60, "temperature": 0, "ignore_eos": True}


@contextmanager
def process(*args: str) -> Iterator["subprocess.Popen[bytes]"]:
    with tempfile.TemporaryFile() as log:
        started = subprocess.Popen(baton(*args), cwd=ROOT, env=environment(), stdout=log, stderr=log)
        try:
            yield started
        except BaseException:
            log.seek(0)
            print(log.read().decode())  # noqa: T201 - pytest shows it with the failure
            raise
        finally:
            started.send_signal(signal.SIGTERM)
            try:
                started.wait(20)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


class Client(threading.Thread):
    """A client that sends requests to one router until it is stopped, or `most` times. `answers` are texts; an error
    is recorded as its own text."""

    def __init__(self, api: Api, *, most: int = 1_000_000) -> None:
        super().__init__(daemon=True)
        self._api = api
        self._most = most
        self.over = threading.Event()
        self.answers: list[str] = []

    def run(self) -> None:
        while not self.over.is_set() and len(self.answers) < self._most:
            try:
                self.answers.append(text_of(list(self._api.stream("/v1/completions", BODY))))
            except (httpx.HTTPError, AssertionError) as exc:
                self.answers.append(f"{type(exc).__name__}: {exc}")
                return

    def goes_on(self) -> None:
        """Returns when it has got two more answers: one of them was asked for after this call."""
        before = len(self.answers)
        wait_until(lambda: len(self.answers) >= before + 2 or not self.is_alive(), timeout_s=60, what="answers go on")


def health(api: Api) -> dict[str, Any]:
    with contextlib.suppress(httpx.TransportError):
        return dict(api.client.get("/health").json())
    return {}


def sees_it(api: Api) -> bool:
    return bool(health(api).get("pools", {}).get("unified") == 1)


def test_redis_may_fail_and_routers_may_be_killed_under_load(llama: Path, tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    redis.start()
    ports = [free_port(), free_port()]
    common = ("--model", str(llama), "--registry", redis.url)
    with ExitStack() as stack:
        stack.callback(redis.kill)
        router = ("router", *common, "--instance-wait-s", "120")
        routers = [stack.enter_context(process(*router, "--port", str(port))) for port in ports]
        apis = [stack.enter_context(Api(f"http://127.0.0.1:{port}")) for port in ports]

        wait_until(lambda: all(health(api) for api in apis), timeout_s=120, what="routers that listen")
        # Nothing has been started that could answer: a request waits for it.
        early = Client(apis[0], most=1)
        early.start()
        cpu = ("--device", "cpu", "--dtype", "float32", "--kv-cache-memory-bytes", "64M", "--threads", "1")
        stack.enter_context(process("unified", *common, *cpu, "--http-port", "0"))
        wait_until(lambda: all(map(sees_it, apis)), timeout_s=120, what="routers that see the instance")
        expected = text_of(list(apis[0].stream("/v1/completions", BODY)))
        early.join(60)
        assert early.answers == [expected]
        clients = [Client(api) for api in apis]
        for client in clients:
            client.start()

        def all_go_on() -> None:
            for client in clients:
                client.goes_on()

        redis.freeze()
        all_go_on()
        redis.thaw()
        redis.kill()
        wait_until(lambda: not health(apis[0])["registry_connected"], timeout_s=30, what="the loss is seen")
        all_go_on()
        redis.start()
        for api in apis:
            wait_until(
                lambda api=api: health(api)["registry_connected"] and sees_it(api),  # type: ignore[misc]
                timeout_s=30,
                what="a router that has recovered",
            )
        all_go_on()

        routers[0].kill()
        clients[0].join(30)
        clients[1].goes_on()
        clients[1].over.set()
        clients[1].join(60)
        assert clients[0].answers[-1] != expected, "its stream broke with it"
        assert set(clients[0].answers[:-1]) == set(clients[1].answers) == {expected}

"""A private Prometheus for one test: it scrapes each second, and knows the labels that its operator would add."""

import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import yaml

from baton_serve.bench.ports import free_port
from tests.e2e.cluster import wait_until
from tests.helm.chart import Manifest

START_TIMEOUT_S = 30.0
WINDOW = "1m"


class Prometheus:
    """`targets` are addresses by component; `groups` are those of a PrometheusRule."""

    def __init__(self, folder: Path, groups: list[Manifest], targets: dict[str, str]) -> None:
        self._folder = folder
        self._size = len(targets)
        port = free_port()
        self._address = f"127.0.0.1:{port}"
        self._client = httpx.Client(base_url=f"http://{self._address}")
        scraped = [
            {"targets": [address], "labels": {"namespace": "llm", "pod": f"test-baton-{component}-0"}}
            for component, address in targets.items()
        ]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(folder / "rules.yaml")],
            "scrape_configs": [{"job_name": "baton", "static_configs": scraped}],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))

    def __enter__(self) -> "Prometheus":
        flags = {"config.file": self._folder / "prometheus.yaml", "storage.tsdb.path": self._folder / "data"}
        command = ["prometheus", *(f"--{name}={value}" for name, value in flags.items())]
        self._process = subprocess.Popen(
            [*command, f"--web.listen-address={self._address}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until(self._answers, timeout_s=START_TIMEOUT_S, what="Prometheus")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()
        self._process.terminate()
        self._process.wait(10)

    def wait_for_scrapes(self, count: int = 3) -> None:
        """`count` more of each target."""
        seen = {pod: value for pod, value in self._scrapes().items()}

        def are_copied() -> bool:
            now = self._scrapes()
            return len(now) == self._size and all(value >= seen.get(pod, 0) + count for pod, value in now.items())

        wait_until(are_copied, timeout_s=30, what="scrapes of all targets")

    def value_of(self, expression: str) -> float:
        """The first sample; NaN without any. Raises for an expression that Prometheus does not accept."""
        result = self._query(expression.replace("$__rate_interval", WINDOW).replace('="$model_name"', '=~".+"'))
        return float(result[0]["value"][1]) if result else float("nan")

    def _scrapes(self) -> dict[str, float]:
        found = self._query("count_over_time(up[1h]) and up == 1")
        return {one["metric"]["pod"]: float(one["value"][1]) for one in found}

    def _query(self, expression: str) -> list[Any]:
        answer = self._client.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        return list(answer["data"]["result"])

    def _answers(self) -> bool:
        assert self._process.poll() is None, "prometheus ended at its start: its rules or configuration are wrong"
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

"""A release in a model of the API server: what Helm, the chart's Jobs, and the controller of Deployments do to it."""

import json
import runpy
from dataclasses import dataclass, field
from typing import Any

from tests.helm.api_server import LiveObject, tree
from tests.helm.chart import CHART, Manifest, environment_of, objects, of_kind

SCRIPT = runpy.run_path(str(CHART / "files" / "deployments.py"))
REPLICAS = ("spec", "replicas")


@dataclass
class Pods:
    """The pods of one Deployment. `old` and `new` are ready; `starting` is a new one."""

    template: str = ""
    old: int = 0
    new: int = 0
    starting: int = 0

    @property
    def ready(self) -> int:
        return self.old + self.new

    def scale(self, number: int) -> None:
        self.new = max(0, number - self.old - self.starting)
        self.old = min(self.old, number)


@dataclass
class Release:
    """A release; `is_server_side` is Helm 4's way to write. `events` are the pools that began or ended a rollout."""

    is_server_side: bool
    live: dict[str, LiveObject] = field(default_factory=dict)
    pods: dict[str, Pods] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    """Deployments whose new pods never become ready."""
    jobs: list[Manifest] = field(default_factory=list)
    _revisions: list[list[Manifest]] = field(default_factory=list)

    def install(self, values: Manifest) -> None:
        self._write(self._rendered(values), before=False)
        self.settle()
        self.run_rollout()

    def upgrade(self, values: Manifest) -> None:
        self._write(self._rendered(values), before=True)

    def rollback(self, revision: int) -> None:
        """Helm does not render again: it writes the manifests that it has stored."""
        self._write(self._revisions[revision - 1], before=True)

    def scale(self, name: str, number: int, *, by: str = "kubectl") -> None:
        self.live[name].update(by, REPLICAS, number)

    def replicas(self, name: str) -> int:
        return int(self.live[name].fields[REPLICAS])

    def run_rollout(self, seconds: int = 40) -> None:
        """Run the Job of the release, while the controller works, for at most this time."""
        for job in self.jobs:
            environ = container_environment(job)
            pools, sleeps = json.loads(environ["POOLS"]), iter(range(seconds))

            def sleep(_: float, sleeps: Any = sleeps) -> None:
                self.control()
                if next(sleeps, None) is None:
                    raise TimeoutError("the Job's deadline")

            SCRIPT["roll"](self, pools, environ["ROLLOUT"], sleep=sleep)

    def settle(self) -> None:
        for _ in range(20):
            self.control()

    def control(self) -> None:
        """Do one step of the controller of Deployments: maxSurge 0, maxUnavailable 1."""
        for name, live in self.live.items():
            pods, number = self.pods.setdefault(name, Pods()), self.replicas(name)
            template = json.dumps(tree({p: v for p, v in live.fields.items() if p[:2] == ("spec", "template")}))
            is_paused = live.fields.get(("spec", "paused"), False)
            if pods.template != template and not is_paused:
                self.events.append(f"{name} begins")
                pods.template, pods.old, pods.new = template, pods.ready, 0
            if pods.starting:
                if name not in self.broken:
                    pods.starting, pods.new = 0, pods.new + 1
                    if not pods.old:
                        self.events.append(f"{name} ends")
            elif pods.old and not is_paused:
                pods.old, pods.starting = pods.old - 1, 1
            else:
                pods.scale(number)

    def get(self, name: str) -> Manifest | None:
        if name not in self.live:
            return None
        found, pods = tree(self.live[name].fields), self.pods.setdefault(name, Pods())
        template = json.dumps(tree({p: v for p, v in self.live[name].fields.items() if p[:2] == ("spec", "template")}))
        found["metadata"]["generation"] = 2
        found["status"] = {
            "observedGeneration": 2 if template == pods.template or found["spec"].get("paused") else 1,
            "replicas": pods.ready + pods.starting,
            "updatedReplicas": pods.new + pods.starting,
            "availableReplicas": pods.ready,
        }
        return found

    def apply(self, name: str, manager: str, *, annotations: dict[str, str], spec: Manifest) -> None:
        self.live[name].apply(manager, {"metadata": {"annotations": annotations}, "spec": spec}, force=True)

    def _rendered(self, values: Manifest) -> list[Manifest]:
        return objects(values, revision=len(self._revisions) + 1)

    def _write(self, rendered: list[Manifest], *, before: bool) -> None:
        if before:
            self._run_hook(rendered, "before")
        old = {o["metadata"]["name"]: o for o in self._revisions[-1]} if self._revisions else {}
        for deployment in of_kind(rendered, "Deployment"):
            name = deployment["metadata"]["name"]
            live = self.live.setdefault(name, LiveObject())
            if self.is_server_side:
                live.apply("helm", deployment)
            else:
                live.merge(old.get(name, {}), deployment)
        self._revisions.append(rendered)
        self.jobs = [job for job in of_kind(rendered, "Job") if "annotations" not in job["metadata"]]
        self._run_hook(rendered, "after")

    def _run_hook(self, rendered: list[Manifest], when: str) -> None:
        for job in of_kind(rendered, "Job"):
            environ = container_environment(job)
            if environ["STEP"] == when:
                SCRIPT["apply_replicas"](self, json.loads(environ["WANTED"]), before_upgrade=when == "before")
                if when == "before":
                    SCRIPT["pause"](self, json.loads(environ["POOLS"]), environ["ROLLOUT"])


def container_environment(job: Manifest) -> dict[str, str]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return environment_of([], container, secrets={}, fields={})

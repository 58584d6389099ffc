"""The number of pods survives upgrades, rollbacks and autoscaling, by the field ownership of an API server."""

import json
import runpy
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.helm.api_server import ApplyConflictError, LiveObject, tree
from tests.helm.chart import CHART, Manifest, environment_of, named, objects, of_kind

SCRIPT = runpy.run_path(str(CHART / "files" / "replicas.py"))
REPLICAS = ("spec", "replicas")
DECODE = "test-baton-decode"
IN_MANIFEST: Manifest = {"replicasHook": {"enabled": False}}


class Release:
    """A release whose Deployments are in a model of the API server; `is_server_side` is Helm 4's way to write."""

    def __init__(self, *, is_server_side: bool) -> None:
        self._is_server_side = is_server_side
        self._revisions: list[list[Manifest]] = []
        self.live: dict[str, LiveObject] = {}

    def install(self, values: Manifest) -> None:
        self._write(objects(values), before=False)

    def upgrade(self, values: Manifest) -> None:
        self._write(objects(values), before=True)

    def rollback(self, revision: int) -> None:
        """Helm does not render again: it writes the manifests that it has stored."""
        self._write(self._revisions[revision - 1], before=True)

    def scale(self, name: str, number: int, *, by: str = "kubectl") -> None:
        self.live[name].update(by, REPLICAS, number)

    def replicas(self, name: str = DECODE) -> int:
        return int(self.live[name].fields[REPLICAS])

    def _write(self, rendered: list[Manifest], *, before: bool) -> None:
        if before:
            self._run_hook(rendered, "before")
        old = {o["metadata"]["name"]: o for o in self._revisions[-1]} if self._revisions else {}
        for deployment in of_kind(rendered, "Deployment"):
            name = deployment["metadata"]["name"]
            live = self.live.setdefault(name, LiveObject())
            if self._is_server_side:
                live.apply("helm", deployment)
            else:
                live.merge(old.get(name, {}), deployment)
        self._revisions.append(rendered)
        self._run_hook(rendered, "after")

    def _run_hook(self, rendered: list[Manifest], when: str) -> None:
        for job in of_kind(rendered, "Job"):
            if job["metadata"]["name"].endswith(f"-{when}"):
                (container,) = job["spec"]["template"]["spec"]["containers"]
                environ = environment_of([], container, secrets={}, fields={})
                for name, scale in json.loads(environ["WANTED"]).items():
                    SCRIPT["apply_replicas"](name, scale, self._send, before_upgrade=environ["BEFORE"] == "1")

    def _send(self, method: str, name: str, body: Manifest | None) -> Manifest | None:
        if name not in self.live:
            return None
        if body is not None:
            self.live[name].apply(SCRIPT["MANAGER"], body, force=True)
        return tree(self.live[name].fields)


@pytest.fixture(params=[True, False], ids=["server-side apply", "three-way merge"])
def release(request: pytest.FixtureRequest) -> Release:
    return Release(is_server_side=request.param)


def decode(number: int, kind: str = "none") -> Manifest:
    return {"decode": {"replicas": number, "autoscaling": {"kind": kind}}}


def test_an_install_has_the_numbers_of_the_values(release: Release) -> None:
    release.install({**decode(3), "unified": {"replicas": 2}})
    assert [release.replicas(f"test-baton-{role}") for role in ("router", "prefill", "decode", "unified")] == [
        2,
        1,
        3,
        2,
    ]


def test_a_number_set_by_hand_survives_upgrade_and_rollback(release: Release) -> None:
    release.install(decode(1))
    release.scale(DECODE, 6)
    release.upgrade({**decode(1), "logging": {"level": "debug"}})
    assert release.replicas() == 6
    release.rollback(1)
    assert release.replicas() == 6


def test_autoscaling_may_be_switched_on_and_off_without_a_change(release: Release) -> None:
    release.install(decode(1))
    release.scale(DECODE, 6)
    release.upgrade(decode(1, "keda"))
    assert release.replicas() == 6
    release.scale(DECODE, 4, by="horizontal-pod-autoscaler")
    release.upgrade(decode(1))
    assert release.replicas() == 4
    release.rollback(2)
    assert release.replicas() == 4


def test_autoscaling_from_the_start_keeps_its_number_when_it_is_switched_off(release: Release) -> None:
    release.install(decode(2, "keda"))
    release.scale(DECODE, 5, by="horizontal-pod-autoscaler")
    release.upgrade(decode(2))
    assert release.replicas() == 5


def test_a_new_number_in_the_values_is_applied(release: Release) -> None:
    release.install(decode(1))
    release.scale(DECODE, 6)
    release.upgrade(decode(3))
    assert release.replicas() == 3
    release.rollback(1)
    assert release.replicas() == 1


def test_a_pool_that_an_upgrade_adds_has_the_number_of_the_values(release: Release) -> None:
    release.install({})
    release.upgrade({"unified": {"replicas": 2}})
    assert release.replicas("test-baton-unified") == 2


def test_a_release_with_numbers_in_its_manifests_keeps_them_when_the_hook_is_enabled(release: Release) -> None:
    release.install({**decode(4), **IN_MANIFEST})
    release.upgrade(decode(4))
    assert release.replicas() == 4


def test_without_the_hook_server_side_apply_conflicts_and_a_merge_resets_the_number() -> None:
    release = Release(is_server_side=True)
    release.install({**decode(1), **IN_MANIFEST})
    release.scale(DECODE, 6)
    with pytest.raises(ApplyConflictError, match="kubectl"):
        release.upgrade({**decode(1), **IN_MANIFEST})
    merged = Release(is_server_side=False)
    merged.install({**decode(1), **IN_MANIFEST})
    merged.scale(DECODE, 6)
    merged.upgrade({**decode(1), **IN_MANIFEST})
    assert merged.replicas() == 1


def test_without_the_hook_switching_to_keda_drops_the_number() -> None:
    release = Release(is_server_side=True)
    release.install({**decode(6), **IN_MANIFEST})
    release.upgrade({**decode(6, "keda"), **IN_MANIFEST})
    assert release.replicas() == 1


def test_the_account_of_the_hook_may_only_read_and_patch_the_deployments_of_the_release() -> None:
    rendered = objects({})
    names = {o["metadata"]["name"] for o in of_kind(rendered, "Deployment")}
    for role in of_kind(rendered, "Role"):
        (rule,) = role["rules"]
        assert set(rule["resourceNames"]) == names and rule["verbs"] == ["get", "patch"]
    for when in ("before", "after"):
        pod = named(rendered, "Job", f"-{when}")["spec"]["template"]["spec"]
        assert pod["serviceAccountName"] == f"test-baton-replicas-{when}"
        assert pod["automountServiceAccountToken"] is True
        assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    hooks = [o["metadata"]["annotations"]["helm.sh/hook"] for o in of_kind(rendered, "Job")]
    assert hooks == ["pre-upgrade,pre-rollback", "post-install,post-upgrade,post-rollback"]


class Api(BaseHTTPRequestHandler):
    requests: ClassVar[list[tuple[str, str, str | None, Any]]] = []

    def _answer(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
        self.requests.append((self.command, self.path, self.headers["Authorization"], body))
        is_known = "/deployments/a" in self.path
        self.send_response(200 if is_known else 404)
        self.end_headers()
        self.wfile.write(b'{"metadata": {}, "spec": {"replicas": 1}}' if is_known else b"{}")

    do_GET = do_PATCH = _answer  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Log no line for each request of the test."""


@pytest.fixture
def api() -> Iterator[str]:
    Api.requests = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(10)
    server.server_close()


def test_the_script_sends_its_token_and_applies_by_its_own_manager(
    api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("secret")
    wanted = {name: {"replicas": 3, "autoscaled": False} for name in ("a", "missing")}
    environ = {
        "API": api,
        "CREDENTIALS": str(tmp_path),
        "NAMESPACE": "llm",
        "BEFORE": "0",
        "WANTED": json.dumps(wanted),
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    SCRIPT["main"]()
    base = "/apis/apps/v1/namespaces/llm/deployments/"
    assert [(method, path) for method, path, _, _ in Api.requests] == [
        ("GET", base + "a"),
        ("PATCH", base + "a?fieldManager=baton-replicas&force=true"),
        ("GET", base + "missing"),
    ]
    assert {token for _, _, token, _ in Api.requests} == {"Bearer secret"}
    assert Api.requests[1][3]["spec"] == {"replicas": 3}

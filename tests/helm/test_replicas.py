"""The number of pods survives upgrades, rollbacks and autoscaling, by the field ownership of an API server."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.helm.api_server import ApplyConflictError
from tests.helm.chart import Manifest, named, objects, of_kind
from tests.helm.releases import SCRIPT, Release

DECODE = "test-baton-decode"
IN_MANIFEST: Manifest = {"upgradeJobs": {"enabled": False}}


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
    assert release.replicas(DECODE) == 6
    release.rollback(1)
    assert release.replicas(DECODE) == 6


def test_autoscaling_may_be_switched_on_and_off_without_a_change(release: Release) -> None:
    release.install(decode(1))
    release.scale(DECODE, 6)
    release.upgrade(decode(1, "keda"))
    assert release.replicas(DECODE) == 6
    release.scale(DECODE, 4, by="horizontal-pod-autoscaler")
    release.upgrade(decode(1))
    assert release.replicas(DECODE) == 4
    release.rollback(2)
    assert release.replicas(DECODE) == 4


def test_autoscaling_from_the_start_keeps_its_number_when_it_is_switched_off(release: Release) -> None:
    release.install(decode(2, "keda"))
    release.scale(DECODE, 5, by="horizontal-pod-autoscaler")
    release.upgrade(decode(2))
    assert release.replicas(DECODE) == 5


def test_a_new_number_in_the_values_is_applied(release: Release) -> None:
    release.install(decode(1))
    release.scale(DECODE, 6)
    release.upgrade(decode(3))
    assert release.replicas(DECODE) == 3
    release.rollback(1)
    assert release.replicas(DECODE) == 1


def test_a_pool_that_an_upgrade_adds_has_the_number_of_the_values(release: Release) -> None:
    release.install({})
    release.upgrade({"unified": {"replicas": 2}})
    assert release.replicas("test-baton-unified") == 2


def test_a_release_with_numbers_in_its_manifests_keeps_them_when_the_hook_is_enabled(release: Release) -> None:
    release.install({**decode(4), **IN_MANIFEST})
    release.upgrade(decode(4))
    assert release.replicas(DECODE) == 4


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
    assert merged.replicas(DECODE) == 1


def test_without_the_hook_switching_to_keda_drops_the_number() -> None:
    release = Release(is_server_side=True)
    release.install({**decode(6), **IN_MANIFEST})
    release.upgrade({**decode(6, "keda"), **IN_MANIFEST})
    assert release.replicas(DECODE) == 1


def test_the_accounts_of_the_jobs_may_only_read_and_patch_the_deployments_of_the_release() -> None:
    rendered = objects({})
    names = {o["metadata"]["name"] for o in of_kind(rendered, "Deployment")}
    accounts = {o["metadata"]["name"] for o in of_kind(rendered, "Role")}
    assert accounts == {f"test-baton-{name}" for name in ("upgrade-before", "upgrade-after", "rollout")}
    for role in of_kind(rendered, "Role"):
        (rule,) = role["rules"]
        assert set(rule["resourceNames"]) == names and rule["verbs"] == ["get", "patch"]
    for job in of_kind(rendered, "Job"):
        pod = job["spec"]["template"]["spec"]
        assert pod["serviceAccountName"] in accounts
        assert pod["automountServiceAccountToken"] is True
        assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    hooks = {
        name: named(rendered, "Job", f"-{name}")["metadata"]["annotations"]["helm.sh/hook"]
        for name in ("before", "after")
    }
    assert hooks == {"before": "pre-upgrade,pre-rollback", "after": "post-install,post-upgrade,post-rollback"}


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
        "STEP": "after",
        "ROLLOUT": "r2",
        "POOLS": json.dumps([["a", "missing"]]),
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

"""The script with which init containers download the model, and what the chart gives it."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import helm_python
import pytest

from tests.helm.chart import CHART, Manifest, environment_of, named, objects, of_kind, pod_of

SCRIPT = runpy.run_path(str(CHART / "files" / "download.py"))
NO_SPACE: type[Exception] = SCRIPT["NoSpaceError"]
SIZES = {"config.json": 10, "model.safetensors": 1000}
SECRETS = {"HF_TOKEN": "hf_x"}


def container(role: str, values: Manifest) -> Manifest:
    (found,) = pod_of(objects(values), role)["initContainers"]
    return dict(found)


def test_a_volume_that_is_too_small_is_named_before_the_download(tmp_path: Path) -> None:
    SCRIPT["check_space"](SIZES, tmp_path, free=1010, limit=0)
    with pytest.raises(NO_SPACE, match="are free"):
        SCRIPT["check_space"](SIZES, tmp_path, free=1009, limit=0)
    with pytest.raises(NO_SPACE, match=r"cache\.size"):
        SCRIPT["check_space"](SIZES, tmp_path, free=10**6, limit=1009)


def test_files_that_are_present_need_no_space(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    SCRIPT["check_space"](SIZES, tmp_path, free=10, limit=0)
    (tmp_path / "model.safetensors").write_bytes(bytes(999))
    with pytest.raises(NO_SPACE):
        SCRIPT["check_space"](SIZES, tmp_path, free=10, limit=0)


def test_what_another_pod_has_received_of_a_file_needs_no_space(tmp_path: Path) -> None:
    part = tmp_path / ".cache" / "huggingface" / "download" / "model.etag.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(900))
    SCRIPT["check_space"](SIZES, tmp_path, free=110, limit=0)
    with pytest.raises(NO_SPACE):
        SCRIPT["check_space"](SIZES, tmp_path, free=109, limit=0)


class Hub:
    """A hub whose first answers are `errors`."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.waits: list[float] = []
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)


def test_a_failed_download_is_tried_again_after_growing_waits() -> None:
    hub = Hub(ConnectionError("reset"), TimeoutError("slow"))
    SCRIPT["download"](hub, sleep=hub.waits.append)
    assert hub.calls == 3 and hub.waits == [5.0, 10.0]


def test_the_last_error_is_raised_after_six_attempts() -> None:
    hub = Hub(*[ConnectionError("reset")] * 9)
    with pytest.raises(ConnectionError):
        SCRIPT["download"](hub, sleep=hub.waits.append)
    assert hub.calls == 6 and len(hub.waits) == 5


def test_an_error_that_stays_is_raised_without_another_attempt() -> None:
    hub = Hub(NO_SPACE("full"))
    with pytest.raises(NO_SPACE):
        SCRIPT["download"](hub, sleep=hub.waits.append)
    assert hub.calls == 1


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_proxies_and_certificates_reach_the_download(role: str) -> None:
    proxy = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
    ca = {"name": "SSL_CERT_FILE", "value": "/ca/ca.crt"}
    block: dict[str, Any] = {
        "extraEnv": [proxy, ca],
        "extraEnvFrom": [{"secretRef": {"name": "hub"}}],
        "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
        "extraVolumeMounts": [{"name": "ca", "mountPath": "/ca"}],
    }
    found = container(role, {role: block})
    assert proxy in found["env"] and ca in found["env"]
    assert found["envFrom"] == block["extraEnvFrom"]
    assert {"name": "ca", "mountPath": "/ca"} in found["volumeMounts"]


def download(**cache: Any) -> Manifest:
    return {"model": {"source": {"download": {"cache": cache}}}}


@pytest.mark.parametrize(
    ("cache", "limit"),
    [({"kind": "emptyDir"}, 64 << 30), ({"kind": "emptyDir", "size": "500Mi"}, 500 << 20), ({}, 0)],
)
def test_the_limit_of_the_volume_is_known_to_the_download(cache: Manifest, limit: int) -> None:
    found = container("decode", download(**cache))
    assert environment_of([], found, secrets=SECRETS, fields={})["LIMIT_BYTES"] == str(limit)


def test_a_limit_that_the_download_cannot_read_is_refused() -> None:
    with pytest.raises(helm_python.HelmError, match="size"):
        objects(download(size="64 gigabytes"))


def volume(rendered: list[Manifest], role: str) -> Manifest:
    (found,) = [volume for volume in pod_of(rendered, role)["volumes"] if volume["name"] == "model"]
    return {kind: details for kind, details in found.items() if kind != "name"}


def test_by_default_instances_share_a_claim_of_the_release_and_routers_have_their_own_volumes() -> None:
    rendered = objects({})
    (claim,) = of_kind(rendered, "PersistentVolumeClaim")
    assert claim["spec"] == {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "64Gi"}}}
    for role in ("prefill", "decode"):
        assert volume(rendered, role) == {"persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}
    # They avoid each other's nodes, where a ReadWriteOnce claim cannot follow them.
    assert "emptyDir" in volume(rendered, "router")


def test_routers_use_a_claim_that_can_be_mounted_on_all_nodes() -> None:
    rendered = objects(download(accessModes=["ReadWriteMany"], storageClass="nfs", size="1Ti"))
    (claim,) = of_kind(rendered, "PersistentVolumeClaim")
    assert claim["spec"]["storageClassName"] == "nfs"
    assert volume(rendered, "router") == volume(rendered, "decode")


def test_an_existing_claim_is_used_and_none_is_made() -> None:
    rendered = objects(download(claimName="models", accessModes=["ReadWriteMany"]))
    assert not of_kind(rendered, "PersistentVolumeClaim")
    assert (
        volume(rendered, "decode") == volume(rendered, "router") == {"persistentVolumeClaim": {"claimName": "models"}}
    )


def test_a_folder_on_the_nodes_is_given_to_the_user_of_the_pods_before_the_download() -> None:
    rendered = objects(download(kind="hostPath", hostPath="/srv/cache"))
    assert not of_kind(rendered, "PersistentVolumeClaim")
    assert volume(rendered, "decode") == {"hostPath": {"path": "/srv/cache", "type": "DirectoryOrCreate"}}
    owner, found = pod_of(rendered, "decode")["initContainers"]
    assert found["name"] == "download"
    assert owner["command"] == ["chown", "10001:10001", "/models/model"]
    assert owner["volumeMounts"] == [{"name": "model", "mountPath": "/models/model"}]


def test_models_and_revisions_have_folders_of_their_own_in_the_cache() -> None:
    """Pods of the old version still read their files while new ones download."""
    folders = []
    for source in ({}, {"revision": "v2"}, {"repository": "Qwen/Qwen3-1.7B"}):
        rendered = objects({"model": {"source": {"download": source}}})
        (found,) = pod_of(rendered, "decode")["initContainers"]
        folder = environment_of([], found, secrets=SECRETS, fields={})["FOLDER"]
        for role in ("router", "prefill", "decode"):
            assert named(rendered, "ConfigMap", f"-{role}")["data"][f"BATON__{role.upper()}__MODEL"] == folder
        folders.append(folder)
    assert len(set(folders)) == 3 and all(folder.startswith("/models/model/") for folder in folders)


def test_without_a_download_no_claim_is_made() -> None:
    source = {"kind": "hostPath", "hostPath": {"path": "/srv/models/small"}}
    assert not of_kind(objects({"model": {"source": source}}), "PersistentVolumeClaim")


@pytest.mark.parametrize(("role", "patterns"), [("router", '["*.json","*.jinja","*.txt"]'), ("decode", "[]")])
def test_the_container_runs_the_script(tmp_path: Path, role: str, patterns: str) -> None:
    """The test downloads nothing: the hub is off limits, and the script says so."""
    found = container(role, {})
    assert found["command"] == ["python", "-c"]
    environ = environment_of([], found, secrets=SECRETS, fields={})
    assert environ["PATTERNS"] == patterns
    environ |= {"HF_HUB_OFFLINE": "1", "FOLDER": str(tmp_path / "org" / "name"), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-c", *found["args"]]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "download of Qwen/Qwen3-4B failed" in done.stderr, done.stderr
    assert "offline" in done.stderr.lower()

"""Dockerfile and docker-compose.yaml without an engine: structure, locked versions, settings the code accepts."""

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from baton_serve.services.common.settings.configuration import load
from baton_serve.services.instance.settings import InstanceSettings
from baton_serve.services.router.settings import RouterSettings
from tests.helm.chart import ROOT, objects
from tools.lock_requirements import name_of, wanted

TARGETS = ("router", "worker-xpu", "worker-cuda", "worker-cpu")
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yaml").read_text())


def stages() -> dict[str, list[str]]:
    """Instructions by stage, those of the stages it builds on first."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith(("#", "ARG PYTHON"))]
    found: dict[str, list[str]] = {}
    for line in lines:
        if parts := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            name = parts[2]
            found[name] = list(found.get(parts[1], []))
        else:
            found[name].append(line)
    return found


def locked(image: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / f"{image}.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    return dict(pins)


def test_the_four_targets_are_there() -> None:
    assert set(TARGETS) <= set(stages())


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_is_not_root_is_watched_and_starts_baton(target: str) -> None:
    instructions = stages()[target]
    last_run = max(number for number, line in enumerate(instructions) if line.startswith("RUN"))
    assert instructions.index("USER 10001:10001") > last_run
    assert [line for line in instructions if line.startswith("HEALTHCHECK")]
    assert 'ENTRYPOINT ["baton"]' in instructions


@pytest.mark.parametrize("target", TARGETS)
def test_whatever_pip_installs_is_locked(target: str) -> None:
    """From a lock file, the wheel of this repository without dependencies, or one torch of an exact version."""
    installs = [words for line in stages()[target] for words in re.findall(r"pip install ([^&]*)", line)]
    image = "router" if target == "router" else "worker"
    expected = [f"-r requirements/{image}.txt", "--no-deps /wheels/*.whl"]
    if image == "worker":
        expected.insert(1, '${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"')
        assert [line for line in stages()[target] if re.fullmatch(r"ARG TORCH=torch==[\d.]+", line)]
    assert [install.strip() for install in installs] == expected


@pytest.mark.parametrize("image", ["router", "worker"])
def test_the_lock_meets_every_requirement_of_the_project(image: str) -> None:
    versions = locked(image)
    for line in wanted()[image]:
        requirement = Requirement(line)
        assert requirement.specifier.contains(versions[name_of(line)]), line


def test_torch_meets_the_requirement_and_is_in_no_lock() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (torch,) = [Requirement(line) for line in extras["worker"] if name_of(line) == "torch"]
    versions = set(re.findall(r"torch==([\d.]+)", (ROOT / "Dockerfile").read_text()))
    assert len(versions) == 1 and torch.specifier.contains(versions.pop())
    assert "torch" not in locked("router") | locked("worker")


def test_the_router_image_has_neither_torch_nor_transformers() -> None:
    # numpy resamples audio in a process of its own; the router imports neither it nor torch.
    assert {"torch", "transformers", "safetensors"}.isdisjoint(locked("router"))
    assert "huggingface-hub" in locked("router"), "the chart downloads models with `hf`"


def test_every_copied_path_exists_and_is_let_through() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY"):
            for path in shlex.split(line)[1:-1]:
                assert (ROOT / path).exists(), path
                assert f"!{path.split('/')[0]}" in ignored


def test_every_package_of_the_wheel_is_copied() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    copied = {line.split()[1] for line in stages()["sources"] if line.startswith("COPY") and len(line.split()) == 3}
    assert set(packages["packages"]) <= copied


def test_the_chart_names_the_images_that_are_built() -> None:
    used = set()
    for device in ("xpu", "cuda", "cpu"):
        used |= set(re.findall(r"ghcr.io/baton-serve/baton-([a-z-]+):", str(objects({"gpu": {"device": device}}))))
    assert used == set(TARGETS)


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


INSTANCES = [f"{role}-{profile}" for role in ("prefill", "decode") for profile in ("cpu", "arc", "nvidia")]


@pytest.mark.parametrize("name", ["router", *INSTANCES])
def test_the_processes_accept_what_compose_gives_them(name: str) -> None:
    service, role = COMPOSE["services"][name], name.split("-")[0]
    given = {name: filled(str(value)) for name, value in service["environment"].items()}
    settings: Any = load(
        RouterSettings if role == "router" else InstanceSettings,
        service["command"][1:],
        given,
        prefix=f"BATON__{role.upper()}__",
        program=role,
        description="",
    )
    assert service["command"][0] == role
    assert settings.registry == "redis://:REDIS_PASSWORD@redis:6379/0"
    mounts = [volume.split(":")[-1 if volume.count(":") == 1 else -2] for volume in map(filled, service["volumes"])]
    assert settings.model in mounts
    assert role == "router" or settings.kv_run_dir in mounts


@pytest.mark.parametrize("name", INSTANCES)
def test_an_instance_has_the_image_and_the_devices_of_its_profile_and_pins_memory(name: str) -> None:
    service, (role, profile) = COMPOSE["services"][name], name.split("-")
    assert service["profiles"] == [profile]
    device = {"cpu": "cpu", "arc": "xpu", "nvidia": "cuda"}[profile]
    assert service["build"]["target"] == f"worker-{device}"
    assert service["environment"][f"BATON__{role.upper()}__DEVICE"] == device
    assert service["ulimits"] == {"memlock": -1}
    assert ("devices" in service) == ("group_add" in service) == (profile == "arc")
    assert ("deploy" in service) == (profile == "nvidia")
    assert service["networks"] == {"default": {"aliases": [role]}}


@pytest.mark.parametrize(
    ("address", "key", "status"),
    [
        ("127.0.0.1", "", 0),
        ("0.0.0.0", "", 2),
        ("192.168.1.5", "", 2),
        ("0.0.0.0", "sk-1", 0),
        ("127.0.0.1", "sk-1", 0),
    ],
)
def test_the_router_is_open_to_other_machines_only_with_a_key(
    tmp_path: Path, address: str, key: str, status: int
) -> None:
    service = COMPOSE["services"]["router"]
    assert filled(service["ports"][0]) == "127.0.0.1:8000:8000"
    baton = tmp_path / "baton"
    baton.write_text('#!/bin/sh\necho "$@"\n')
    baton.chmod(0o755)
    words = [word.replace("$$", "$") for word in [*service["entrypoint"], *service["command"]]]
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "ROUTER_ADDRESS": address, "BATON__ROUTER__API_KEY": key}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=10, check=False)
    assert done.returncode == status
    assert done.stdout == ("router\n" if status == 0 else "")
    assert status == 0 or "API_KEY" in done.stderr


def filled(text: str) -> str:
    """`${NAME:-default}` by its default, `${NAME:?why}` by its name."""
    text = re.sub(r"\$\{(\w+):\?[^}]*\}", r"\1", text)
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def test_each_instance_of_the_box_sees_a_card_of_its_own() -> None:
    services = COMPOSE["services"]
    masks = [services[f"{role}-arc"]["environment"]["ZE_AFFINITY_MASK"] for role in ("prefill", "decode")]
    assert masks == ["0", "1"]
    cards = [services[f"{role}-nvidia"]["deploy"]["resources"]["reservations"] for role in ("prefill", "decode")]
    assert [card["devices"][0]["device_ids"] for card in cards] == [["0"], ["1"]]


def test_compose_scrapes_what_it_starts_and_shows_the_charts_dashboards() -> None:
    services: Mapping[str, Any] = COMPOSE["services"]
    config = yaml.safe_load((ROOT / "deploy" / "prometheus.yaml").read_text())
    ports = {
        role: services[f"{role}-cpu"]["environment"][f"BATON__{role.upper()}__HTTP_PORT"]
        for role in ("prefill", "decode")
    }
    expected = ["router:8000", *(f"{role}:{port}" for role, port in ports.items())]
    assert config["scrape_configs"][0]["static_configs"][0]["targets"] == expected
    for service in ("prometheus", "grafana"):
        for volume in services[service]["volumes"]:
            assert (ROOT / volume.split(":")[0]).exists()

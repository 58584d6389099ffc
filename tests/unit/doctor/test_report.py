"""The text for an issue: what a maintainer needs, and nothing private."""

import getpass
import socket
from pathlib import Path

import pytest

from baton_serve.services.doctor import main as doctor
from baton_serve.services.doctor.findings import DoctorReport, Finding, ok, problem
from baton_serve.services.doctor.report import Redaction, as_issue_text
from baton_serve.services.doctor.settings import DoctorSettings
from tests.unit.doctor.machine import add_card, install

REDACTION = Redaction("node7.example.org", "alice")


def arc_machine(root: Path) -> Path:
    add_card(root, 0)
    (root / "sys/class/drm/renderD128/device/device").write_text("0xe20b\n")
    install(root, "libze-intel-gpu1", "25.18.33578.6-1")
    for path, text in {
        "proc/sys/kernel/osrelease": "6.14.0-33-generic\n",
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: A CPU\nflags\t\t: fpu avx2 amx_tile amx_bf16\n",
        "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.3 LTS"\n',
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def text_of(root: Path, *findings: Finding, environ: dict[str, str] | None = None) -> str:
    report = DoctorReport("0.1.0", True, list(findings))
    return as_issue_text(report, root, environ or {}, REDACTION)


def test_it_holds_versions_devices_and_findings(tmp_path: Path) -> None:
    text = text_of(arc_machine(tmp_path), ok("cards", "one"), problem("rebar", "off", "turn it on"))
    for part in (
        "(Baton 0.1.0)",
        "system    Linux 6.14.0-33-generic",
        "Ubuntu 24.04.3 LTS",
        "cpu       A CPU, 1 logical CPUs; avx2, amx_tile, amx_bf16",
        "gpu       8086:e20b, driver xe",
        "drivers   libze-intel-gpu1 25.18.33578.6-1",
        "ok       cards: one",
        "PROBLEM  rebar: off",
        "1 problem(s)",
    ):
        assert part in text, text
    assert " torch 2." in text


def test_it_names_nvidias_driver_and_wsl(tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX x86_64  580.159.04  Release\n")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").touch()
    text = text_of(tmp_path)
    assert "drivers   nvidia 580.159.04" in text and "WSL" in text.splitlines()[1]


def test_only_listed_variables_are_in_it(tmp_path: Path) -> None:
    text = text_of(tmp_path, environ={"ZE_AFFINITY_MASK": "0", "HF_TOKEN": "hf_hush", "BATON__ROUTER__API_KEY": "k"})
    assert "variables ZE_AFFINITY_MASK=0\n" in text
    assert "hush" not in text and "API_KEY" not in text


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("cannot load /home/alice/.venv/lib/libsycl.so.8: missing", "cannot load PATH/libsycl.so.8: missing"),
        ("File '/srv/secret-model/weights', line 3", "File 'PATH', line 3"),
        ("/home/alice is not writable", "PATH is not writable"),
        ("node7.example.org and node7 of alice", "HOST and HOST of USER"),
        ("see /dev/dri/renderD128 and /usr/bin/g++", "see /dev/dri/renderD128 and /usr/bin/g++"),
        ("host → host 8.6 GB/s in/out", "host → host 8.6 GB/s in/out"),
    ],
)
def test_private_names_in_messages_are_replaced(said: str, shown: str) -> None:
    assert REDACTION.apply(said) == shown


def test_the_command_prints_it_with_the_transports_and_kernels_and_without_this_machines_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert doctor.main(["--report"]) == 0
    text = capsys.readouterr().out
    for check in ("torch: torch", "transport usm: host → host", "transport zeromq", "kernel decode attention"):
        assert check in text, text
    assert str(Path.home()) not in text.split()
    user = getpass.getuser()
    for name in {socket.gethostname(), user} - {"root", ""}:
        assert name not in text.replace("/", " ").split()


def test_without_the_devices_no_kernel_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--report", "--no-device"]) == 0
    text = capsys.readouterr().out
    assert "transport zeromq" in text and "ok       kernel" not in text and "torch: torch" not in text


@pytest.mark.parametrize("other", ["--json", "--registry=redis://host", "--peer=host:1"])
def test_it_takes_no_addresses(other: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        doctor.main(["--report", other])
    assert "leave out --json, --registry and --peer" in capsys.readouterr().err
    assert DoctorSettings(report=True).report

"""The topology read from a host whose /sys and /proc are written by the test."""

import os
from pathlib import Path

import pytest

from baton_serve.services.common.cpus.allocation import Cpu
from baton_serve.services.common.cpus.topology import cpu_list, this_host


@pytest.fixture(autouse=True)
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})


def write(root: Path, path: str, text: str = "") -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_hyperthreads_and_nodes_are_read(tmp_path: Path) -> None:
    for number, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        folder = f"sys/devices/system/cpu/cpu{number}"
        write(tmp_path, f"{folder}/topology/thread_siblings_list", siblings + "\n")
        write(tmp_path, f"{folder}/node{number % 2}/cpulist")
    found = this_host(tmp_path)
    assert found.cpus == (Cpu(0, 0, 0), Cpu(1, 1, 1), Cpu(2, 0, 0), Cpu(3, 1, 1))
    assert found.num_cores == 2 and found.quota is None


def test_a_system_without_topology_files_has_whole_cores_on_one_node(tmp_path: Path) -> None:
    assert this_host(tmp_path).cpus == tuple(Cpu(number, number, 0) for number in range(4))


def test_the_least_limit_of_the_groups_above_counts(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/pods/mine\n")
    write(tmp_path, "sys/fs/cgroup/pods/cpu.max", "250000 100000\n")
    write(tmp_path, "sys/fs/cgroup/pods/mine/cpu.max", "max 100000\n")
    assert this_host(tmp_path).quota == 2.5


def test_in_a_container_the_limit_lies_at_the_top(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "150000 100000\n")
    assert this_host(tmp_path).num_cores == 1


def test_version_1_is_read_too(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us", "300000\n")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us", "100000\n")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
    assert this_host(tmp_path).quota == 3.0


def test_the_kernel_s_lists_are_understood() -> None:
    assert cpu_list("0-3,8") == (0, 1, 2, 3, 8)

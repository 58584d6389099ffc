"""Limits of the operating system."""

import resource
from pathlib import Path

from baton_serve.services.doctor.findings import Finding
from baton_serve.services.doctor.limits import check_limits


def found(root: Path, **limits: int) -> dict[str, Finding]:
    given = {resource.RLIMIT_MEMLOCK: limits.get("memlock", -1), resource.RLIMIT_NOFILE: limits.get("nofile", 65536)}
    return {f.check: f for f in check_limits(root, lambda which: (given[which], given[which]))}


def machine(root: Path, free_kib: int = 32 << 20) -> Path:
    (root / "dev/shm").mkdir(parents=True)
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {free_kib} kB\n")
    return root


def test_generous_limits_are_fine(tmp_path: Path) -> None:
    checks = found(machine(tmp_path))
    assert all(checks[name].status == "ok" for name in ("locked memory", "open files", "host memory", "memfd"))


def test_few_files_are_a_warning(tmp_path: Path) -> None:
    assert found(machine(tmp_path), nofile=1024)["open files"].status == "warning"


def test_little_locked_memory_is_a_note(tmp_path: Path) -> None:
    assert found(machine(tmp_path), memlock=8 << 20)["locked memory"].status == "note"


def test_little_free_memory_is_a_warning(tmp_path: Path) -> None:
    assert found(machine(tmp_path, free_kib=1 << 20))["host memory"].status == "warning"


def test_a_missing_dev_shm_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    checks = found(tmp_path)
    assert checks["shared memory"].status == "warning"
    assert checks["host memory"].status == "note"


def test_whatever_is_not_fine_has_a_remedy(tmp_path: Path) -> None:
    checks = found(machine(tmp_path, free_kib=1), nofile=10, memlock=0)
    assert all(f.remedy for f in checks.values() if f.status in ("warning", "problem"))

"""What the operating system grants: shared memory, locked memory, open files, threads, a compiler."""

import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from baton_serve.services.doctor.findings import Finding, note, ok, warning

MIN_SHM_BYTES = 2**30
MIN_OPEN_FILES = 4096
MIN_MEMORY_BYTES = 8 * 2**30

ReadLimit = Callable[[int], tuple[int, int]]


def check_limits(root: Path = Path("/"), limit: ReadLimit = resource.getrlimit) -> Iterator[Finding]:
    yield _shared_memory(root / "dev/shm")
    yield _locked_memory(limit(resource.RLIMIT_MEMLOCK)[0])
    yield _open_files(*limit(resource.RLIMIT_NOFILE))
    yield _host_memory(root)
    yield _memfd()
    yield _compiler()


def _shared_memory(path: Path) -> Finding:
    try:
        state = os.statvfs(path)
    except OSError:
        return warning("shared memory", "/dev/shm is missing", "mount a tmpfs there: docker --shm-size=2g")
    size = state.f_blocks * state.f_frsize
    if size >= MIN_SHM_BYTES:
        return ok("shared memory", f"/dev/shm has {size / 2**30:.1f} GiB")
    return warning(
        "shared memory",
        f"/dev/shm has {size / 2**20:.0f} MiB",
        "give it 2 GiB: docker --shm-size=2g; Helm <pool>.shmSizeLimit",
    )


def _locked_memory(limit: int) -> Finding:
    if limit in (resource.RLIM_INFINITY, -1):
        return ok("locked memory", "unlimited")
    return note(
        "locked memory",
        f"at most {limit / 2**20:.0f} MiB may be locked",
        "pinned staging buffers want `ulimit -l unlimited`; docker --ulimit memlock=-1",
    )


def _open_files(soft: int, hard: int) -> Finding:
    if soft in (resource.RLIM_INFINITY, -1) or soft >= MIN_OPEN_FILES:
        return ok("open files", f"{soft}")
    return warning(
        "open files",
        f"at most {soft} files and sockets (hard limit {hard})",
        "a router with many streams needs more: `ulimit -n 65536`; docker --ulimit nofile=65536",
    )


def _host_memory(root: Path) -> Finding:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return note("host memory", "unknown")
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    free = sizes.get("MemAvailable", 0)
    text = f"{free / 2**30:.1f} GiB of {sizes.get('MemTotal', 0) / 2**30:.1f} GiB free"
    if free >= MIN_MEMORY_BYTES:
        return ok("host memory", text)
    return warning("host memory", text, "loading an 8B model takes about 16 GiB of host memory for a moment")


def _memfd() -> Finding:
    try:
        os.close(os.memfd_create("baton-doctor"))
    except OSError as exc:
        remedy = "allow memfd_create in the container's seccomp profile; until then blocks travel by zeromq"
        return warning("memfd", f"memory cannot be shared between processes: {exc.strerror}", remedy)
    return ok("memfd", "memory can be shared between processes")


def _compiler() -> Finding:
    found = shutil.which("g++") or shutil.which("c++")
    if found:
        return ok("compiler", found)
    return warning("compiler", "no g++", "install g++: CPU kernels and Triton's launchers are built at first use")

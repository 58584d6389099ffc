"""Decides which limits of the operating system are a problem: shared memory, locked memory, open files, host memory, a
compiler.
"""

import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from baton_serve.services.doctor.findings import Finding, note, ok, warning

MIN_SHM_BYTES = 2**30
"""Smallest /dev/shm without a warning."""
MIN_OPEN_FILES = 4096
"""Smallest soft limit of open files without a warning: each stream of a router holds a socket."""
MIN_MEMORY_BYTES = 8 * 2**30
"""Smallest available host memory without a warning."""

ReadLimit = Callable[[int], tuple[int, int]]
"""Returns the soft and the hard value of a limit, as `resource.getrlimit` does."""


def check_limits(root: Path = Path("/"), limit: ReadLimit = resource.getrlimit) -> Iterator[Finding]:
    """Yield findings about the limits of this process and machine: shared and locked memory, open files, host memory,
    compiler. `root` is the folder with `dev` and `proc`; `limit` reads a limit of the process.
    """
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
        return warning("shared memory", "/dev/shm is missing", "mount a tmpfs there; docker --shm-size=2g")
    size = state.f_blocks * state.f_frsize
    if size >= MIN_SHM_BYTES:
        return ok("shared memory", f"/dev/shm has {size / 2**30:.1f} GiB")
    return warning(
        "shared memory",
        f"/dev/shm has {size / 2**20:.0f} MiB",
        "give it 2 GiB: mount -o remount,size=2g /dev/shm; docker --shm-size=2g; Helm <pool>.shmSizeLimit",
    )


def _locked_memory(limit: int) -> Finding:
    # Linux reports "unlimited" as RLIM_INFINITY, which Python shows as -1.
    if limit in (resource.RLIM_INFINITY, -1):
        return ok("locked memory", "no limit")

    return note(
        "locked memory",
        f"this user may lock at most {limit / 2**20:.0f} MiB",
        "only if pinned staging buffers fail: `ulimit -l unlimited`; docker --ulimit memlock=-1",
    )


def _open_files(soft: int, hard: int) -> Finding:
    if soft in (resource.RLIM_INFINITY, -1) or soft >= MIN_OPEN_FILES:
        return ok("open files", "no limit" if soft in (resource.RLIM_INFINITY, -1) else f"limit {soft}")
    return warning(
        "open files",
        f"a process may open at most {soft} files and sockets (hard limit {hard})",
        "raise it for a router with many streams: `ulimit -n 65536`; docker --ulimit nofile=65536",
    )


def _host_memory(root: Path) -> Finding:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return note("host memory", "unknown: /proc/meminfo cannot be read")
    # Values of /proc/meminfo are in KiB.
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    # MemFree would leave out the page cache, which the kernel frees when memory is needed.
    free = sizes.get("MemAvailable", 0)
    text = f"{free / 2**30:.1f} GiB of {sizes.get('MemTotal', 0) / 2**30:.1f} GiB are available"
    if free >= MIN_MEMORY_BYTES:
        return ok("host memory", text)
    return warning(
        "host memory",
        text,
        "free memory before loading larger models: loading an 8B model takes about 16 GiB of host memory for a moment",
    )


def _memfd() -> Finding:
    try:
        os.close(os.memfd_create("baton-doctor"))
    except OSError as exc:
        remedy = "allow memfd_create in the container's seccomp profile; without it KV blocks are sent over zeromq"
        return warning("memfd", f"processes cannot share memory (memfd_create: {exc.strerror})", remedy)
    return ok("memfd", "processes can share memory (memfd_create)")


def _compiler() -> Finding:
    found = shutil.which("g++") or shutil.which("c++")
    if found:
        return ok("compiler", found)
    return warning(
        "compiler",
        "neither g++ nor c++ was found",
        "install g++: CPU kernels and Triton's launchers are compiled at their first use",
    )

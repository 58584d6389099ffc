"""Builds one C++ source into a library for this very CPU, at first use, and loads it.

Kept under ~/.cache/baton/native by hash of everything that it depends on; several processes may build at once. (The
engine's kernels are built likewise in `engine.kernels.cpu.build`, which this package must not know.)
"""

import ctypes
import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared")
COMPILE_DEADLINE_S = 60.0


class LibraryUnavailableError(Exception):
    """No library on this machine; the message says why. The caller does without."""


def load_library(source: Path, *, cache: Path | None = None, flags: Sequence[str] = FLAGS) -> ctypes.CDLL:
    """Waits for the compiler, once per machine. Raises `LibraryUnavailableError`."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise LibraryUnavailableError("no C++ compiler (g++) was found")
    try:
        directory = cache or Path.home() / ".cache" / "baton" / "native"
        directory.mkdir(parents=True, exist_ok=True)
        library = directory / f"{source.stem}_{_fingerprint(source, compiler, flags)}.so"
        if not library.exists():
            with tempfile.TemporaryDirectory(prefix="build-", dir=directory) as scratch:
                built = Path(scratch) / library.name
                _compile([compiler, *flags, str(source), "-o", str(built)])
                built.replace(library)
        return ctypes.CDLL(str(library))
    except (OSError, RuntimeError) as error:  # not writable, mounted noexec, no home
        raise LibraryUnavailableError(str(error)) from error


def _compile(command: Sequence[str]) -> None:
    logger.info("compiling %s (once per machine)", command[-3])
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise LibraryUnavailableError(f"{command[0]} took longer than {COMPILE_DEADLINE_S:.0f} s") from error
    if done.returncode != 0:
        raise LibraryUnavailableError(f"{command[0]} failed: {done.stderr.strip()[:200] or f'exit {done.returncode}'}")


def _fingerprint(source: Path, compiler: str, flags: Sequence[str]) -> str:
    real = Path(compiler).resolve()
    stat = real.stat()
    digest = hashlib.sha256(source.read_bytes())
    for part in (str(real), str(stat.st_size), str(stat.st_mtime_ns), *flags, platform.machine(), _processor()):
        digest.update(b"\0" + part.encode())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """What -march=native depends on."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    return "\n".join(line for line in lines if line.split(":")[0].strip() in ("flags", "Features", "model name"))

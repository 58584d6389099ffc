"""Compile one C++ source into a library for this machine's CPU at first use, and load it.

Libraries are kept in `native` in the folder of caches, named by a hash of everything that they depend on. Several
processes may compile at the same time. The engine's kernels are built in the same way by `engine.kernels.cpu.build`,
which this package must not import.
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

from baton_serve.contracts.model_path import process_cache_folder

logger = logging.getLogger(__name__)

FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared")
"""Compiler options. `-march=native` uses every instruction of this CPU, so the library must not move to another one."""
COMPILE_DEADLINE_S = 60.0
"""Seconds after which a compiler is given up."""


class LibraryUnavailableError(Exception):
    """The C++ library cannot be built or loaded on this machine; the message says why. The caller uses its Python
    implementation instead.
    """


def load_library(source: Path, *, cache: Path | None = None, flags: Sequence[str] = FLAGS) -> ctypes.CDLL:
    """Load the shared library that is compiled from the C++ file `source`. Compile it first, unless a process on this
    machine has done so with the same compiler and `flags`. `cache` is the folder of compiled libraries; None is the
    folder `native` in Baton's cache. Raises `LibraryUnavailableError` if it cannot be compiled or loaded.
    """
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise LibraryUnavailableError("no C++ compiler (g++) was found")
    try:
        directory = cache or process_cache_folder() / "native"
        directory.mkdir(parents=True, exist_ok=True)
        library = directory / f"{source.stem}_{_fingerprint(source, compiler, flags)}.so"
        if not library.exists():
            # Compile in the same file system and rename: another process sees either no library or a complete one.
            with tempfile.TemporaryDirectory(prefix="build-", dir=directory) as scratch:
                built = Path(scratch) / library.name
                _compile([compiler, *flags, str(source), "-o", str(built)])
                built.replace(library)
        return ctypes.CDLL(str(library))
    except (
        OSError,
        RuntimeError,
    ) as error:  # the folder is not writable or mounted noexec, or the home folder is missing
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
    # Everything that changes the machine code is part of the name: a home folder may be shared by different machines.
    digest = hashlib.sha256(source.read_bytes())
    for part in (str(real), str(stat.st_size), str(stat.st_mtime_ns), *flags, platform.machine(), _processor()):
        digest.update(b"\0" + part.encode())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """Return the lines of /proc/cpuinfo that name the CPU model and its instruction sets: they determine what the
    compiler option -march=native means.
    """
    lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    return "\n".join(line for line in lines if line.split(":")[0].strip() in ("flags", "Features", "model name"))

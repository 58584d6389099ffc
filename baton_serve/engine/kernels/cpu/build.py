"""Compiles the C++ kernels for this machine's CPU at first use, and loads them; without a compiler plain torch
serves.

The library is cached by a hash of its sources, the compiler and the CPU's flags. While one process compiles, the
others wait for its library. Several processes may compile at the same time if the file system has no locks: each
writes its own file, and all load the one that was finished first. They must not differ, because a build measures
(src/pairs.cpp) how this CPU multiplies bf16 fastest, and all processes of a machine must compute alike. This module
contains nothing else about the kernels.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from baton_serve.contracts.model_path import process_cache_folder

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "src"
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared", "-w")
_COMPILE_DEADLINE_S = 120.0
_LOCK_POLL_S = 0.1
_PROBE = _SOURCES / "pairs.cpp"
_SUFFIXES = {None: "", True: "_widened", False: "_pairs"}
_SLOW_PAIR = 3.0
"""Cost ratio from which bf16 is multiplied as float32. A dot product of pairs does the work of two multiply-adds; CPUs
take 1 to 2 times the time of one, or 4 times.
"""


class KernelsUnavailableError(Exception):
    """The C++ library of CPU kernels cannot be built on this machine; the message says why. The caller uses the
    implementations in plain torch (the twins).
    """


@functools.cache
def load_kernels(cache: Path | None = None, compiler: str | None = None, *, widens: bool | None = None) -> ctypes.CDLL:
    """Return the C++ library of CPU kernels, which is compiled at the first call on a machine. A process loads only
    one, because the library has state (src/turns.cpp).

    `cache` is the folder for compiled libraries; None: `kernels` in Baton's cache folder. If it cannot be used, the
    library is compiled for this process only. `widens` states whether bf16 is multiplied as float32; None uses what the
    build measures to be faster. Only tests set it.

    Raises `KernelsUnavailableError` if it cannot be compiled.
    """
    compiler = compiler or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise KernelsUnavailableError("no C++ compiler (g++) was found")
    name = f"baton_{_fingerprint(compiler)}{_SUFFIXES[widens]}.so"
    try:
        return _load_from(cache or process_cache_folder() / "kernels", name, compiler, widens)
    except (
        OSError,
        RuntimeError,
    ) as error:  # the folder is not writable or mounted noexec, or the home folder is missing
        logger.info("The cache of compiled CPU kernels cannot be used (%s): compiling for this process only", error)
    try:
        with tempfile.TemporaryDirectory(prefix="baton-kernels-") as directory:
            return _load_from(Path(directory), name, compiler, widens)  # a loaded library outlives its file
    except OSError as error:
        raise KernelsUnavailableError(str(error)) from error


def _load_from(directory: Path, name: str, compiler: str, widens: bool | None) -> ctypes.CDLL:
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / name
    if not library.exists():
        with _locked(directory):
            if not library.exists():
                _add(directory, library, compiler, widens)
    return ctypes.CDLL(str(library))


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock of `directory`, which the kernel frees if its owner dies. Go on without it if the file system has
    no locks, or if the owner takes longer than a build may take.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        deadline = time.monotonic() + _COMPILE_DEADLINE_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_LOCK_POLL_S)
                continue
            except OSError as error:
                logger.info("%s cannot be locked (%s)", directory, error)
            break
        yield
    finally:
        os.close(descriptor)


def _add(directory: Path, library: Path, compiler: str, widens: bool | None) -> None:
    # In the same directory, so that `_publish` can link it.
    handle, partial = tempfile.mkstemp(suffix=".so", prefix="build-", dir=directory)
    os.close(handle)
    try:
        _build(compiler, Path(partial), widens)
        _publish(Path(partial), library)
    finally:
        Path(partial).unlink(missing_ok=True)


def _publish(built: Path, library: Path) -> None:
    try:
        library.hardlink_to(built)
    except FileExistsError:  # another process was first: its library is used
        pass
    except OSError:  # the file system has no hard links
        built.replace(library)


def _build(compiler: str, output: Path, widens: bool | None) -> None:
    logger.info("Compiling the CPU kernels with %s (once per machine)", compiler)
    if widens is None:
        widens = _pair_cost(compiler, output) >= _SLOW_PAIR
    sources = [str(path) for path in sorted(_SOURCES.glob("*.cpp"))]
    _compile(compiler, ["-DBATON_WIDENS", *sources] if widens else sources, output)


def _pair_cost(compiler: str, beside: Path) -> float:
    """Return the measured time of a bf16 dot-product instruction, relative to that of a float32 multiply-add. The test
    program is compiled next to the file `beside`.
    """
    probe = beside.with_suffix(".probe.so")
    try:
        _compile(compiler, [str(_PROBE)], probe)
        measure = ctypes.CDLL(str(probe)).baton_pair_cost
        measure.restype = ctypes.c_double
        cost = float(measure())
    finally:
        probe.unlink(missing_ok=True)
    logger.info("A dot product of pairs of bf16 takes %.1f times a float32 multiply-add", cost)
    return cost


def _compile(compiler: str, sources: list[str], output: Path) -> None:
    try:
        done = subprocess.run(
            [compiler, *_FLAGS, *sources, "-o", str(output)],
            capture_output=True,
            text=True,
            timeout=_COMPILE_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise KernelsUnavailableError(f"{compiler} took longer than {_COMPILE_DEADLINE_S:.0f} s") from error
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()
        raise KernelsUnavailableError(f"{compiler} failed: {reason[0] if reason else f'exit {done.returncode}'}")


def _fingerprint(compiler: str) -> str:
    # Everything that changes the machine code is part of the name, also the CPU: machines may share a home folder.
    digest = hashlib.sha256()
    for path in sorted(_SOURCES.iterdir()):
        if path.suffix in {".cpp", ".h"}:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for part in (compiler, *_compiler_identity(compiler), *_FLAGS, platform.machine(), _cpu_flags()):
        digest.update(b"\0" + part.encode())
    return digest.hexdigest()[:24]


def _compiler_identity(compiler: str) -> tuple[str, ...]:
    """Return path, size and modification time of the compiler, which identify its version. The compiler is not run,
    since that would take longer. Raises `KernelsUnavailableError` if it does not exist.
    """
    try:
        real = Path(compiler).resolve()
        stat = real.stat()
    except OSError as error:
        raise KernelsUnavailableError(f"{compiler} cannot be used: {error}") from error
    return str(real), str(stat.st_size), str(stat.st_mtime_ns)


def _cpu_flags() -> str:
    """Return the lines of /proc/cpuinfo, such as the CPU's flags, on which the machine code for -march=native
    depends.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return platform.processor()
    kept = ("flags", "Features", "model name", "cpu family", "model", "CPU part")
    return "\n".join(line for line in lines if line.split(":")[0].strip() in kept)

"""Builds the C++ kernels into one shared library for this very CPU, at first use, and loads it.

The library is cached by hash of sources, compiler and CPU flags. Several processes may build at once: each writes a
file of its own, and all load the first one that was ready, for a build measures (cpu/pairs.cpp) how this CPU multiplies
bf16 best, and processes of one machine must agree. Knows nothing else of what the kernels compute.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "src"
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared", "-w")
_COMPILE_DEADLINE_S = 120.0
_PROBE = _SOURCES / "pairs.cpp"
_SUFFIXES = {None: "", True: "_widened", False: "_pairs"}
_SLOW_PAIR = 3.0
"""A dot product of pairs does the work of two multiply-adds. CPUs are seen at 1 to 2 times their time, or at 4."""


class KernelsUnavailableError(Exception):
    """No library on this machine; the message says why. The caller falls back on the plain-torch twins."""


@functools.cache
def load_kernels(cache: Path | None = None, compiler: str | None = None, *, widens: bool | None = None) -> ctypes.CDLL:
    """`cache` defaults to ~/.cache/baton/kernels; an unusable one is replaced by a directory that lives for the call.
    One library for all of a process, for it has a state (cpu/turns.cpp). `widens`: whether bf16 is multiplied as
    float32, None: what the build measures to be faster; only tests say which.

    Raises `KernelsUnavailableError`.
    """
    compiler = compiler or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise KernelsUnavailableError("no C++ compiler (g++) was found")
    name = f"baton_{_fingerprint(compiler)}{_SUFFIXES[widens]}.so"
    try:
        return _load_from(cache or Path.home() / ".cache" / "baton" / "kernels", name, compiler, widens)
    except (OSError, RuntimeError) as error:  # not writable, mounted noexec, no home
        logger.info("The kernel cache cannot be used (%s): building for this process alone", error)
    try:
        with tempfile.TemporaryDirectory(prefix="baton-kernels-") as directory:
            return _load_from(Path(directory), name, compiler, widens)  # a loaded library outlives its file
    except OSError as error:
        raise KernelsUnavailableError(str(error)) from error


def _load_from(directory: Path, name: str, compiler: str, widens: bool | None) -> ctypes.CDLL:
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / name
    if not library.exists():
        handle, partial = tempfile.mkstemp(suffix=".so", prefix="build-", dir=directory)
        os.close(handle)
        try:
            _build(compiler, Path(partial), widens)
            _publish(Path(partial), library)
        finally:
            Path(partial).unlink(missing_ok=True)
    return ctypes.CDLL(str(library))


def _publish(built: Path, library: Path) -> None:
    try:
        library.hardlink_to(built)
    except FileExistsError:  # the first one counts
        pass
    except OSError:  # a file system without links
        built.replace(library)


def _build(compiler: str, output: Path, widens: bool | None) -> None:
    logger.info("Compiling the CPU kernels with %s (once per machine)", compiler)
    if widens is None:
        widens = _pair_cost(compiler, output) >= _SLOW_PAIR
    sources = [str(path) for path in sorted(_SOURCES.glob("*.cpp"))]
    _compile(compiler, ["-DBATON_WIDENS", *sources] if widens else sources, output)


def _pair_cost(compiler: str, beside: Path) -> float:
    """The time of a bf16 dot product to that of a float32 multiply-add, measured now."""
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
    digest = hashlib.sha256()
    for path in sorted(_SOURCES.iterdir()):
        if path.suffix in {".cpp", ".h"}:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for part in (compiler, *_compiler_identity(compiler), *_FLAGS, platform.machine(), _cpu_flags()):
        digest.update(b"\0" + part.encode())
    return digest.hexdigest()[:24]


def _compiler_identity(compiler: str) -> tuple[str, ...]:
    """Without starting it: where it really is, its size and date."""
    try:
        real = Path(compiler).resolve()
        stat = real.stat()
    except OSError as error:
        raise KernelsUnavailableError(f"{compiler} cannot be used: {error}") from error
    return str(real), str(stat.st_size), str(stat.st_mtime_ns)


def _cpu_flags() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return platform.processor()
    kept = ("flags", "Features", "model name", "cpu family", "model", "CPU part")
    return "\n".join(line for line in lines if line.split(":")[0].strip() in kept)

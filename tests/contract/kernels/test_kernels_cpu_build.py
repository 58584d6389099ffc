"""How the library gets onto a machine: once, at once for several processes, or not at all with a reason."""

import errno
import fcntl
import logging
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch

from baton_serve.engine.kernels import attention_backend, layer_kernels, selection
from baton_serve.engine.kernels.cpu import build as cpu_build
from baton_serve.engine.kernels.cpu.attention import CpuAttention
from baton_serve.engine.kernels.cpu.build import KernelsUnavailableError, load_kernels
from baton_serve.engine.kernels.reference import layers as reference_layers
from baton_serve.engine.kernels.reference.attention import ReferenceAttention

CPU = torch.device("cpu")
needs_a_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("c++")), reason="no C++ compiler (g++) was found"
)


def compiler(directory: Path, script: str) -> str:
    path = directory / "fake-compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def real_library() -> Path:
    return Path(load_kernels()._name)


def copying_compiler(directory: Path) -> str:
    """Return a compiler that copies a real library to its last argument and appends a line to `calls`."""
    script = f'echo x >> {directory}/calls\nfor last; do :; done\ncp {real_library()} "$last"'
    return compiler(directory, script)


@needs_a_compiler
def test_a_library_is_built_once(tmp_path: Path) -> None:
    cxx = copying_compiler(tmp_path)
    for _ in range(2):
        load_kernels(tmp_path / "cache", cxx)
        load_kernels.cache_clear()
    assert (tmp_path / "calls").read_text() == "x\nx\n"  # the probe and the library
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".so"]


@needs_a_compiler
def test_a_process_waits_for_another_one_that_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cxx, cache = copying_compiler(tmp_path), tmp_path / "cache"
    load_kernels(cache, cxx)
    load_kernels.cache_clear()
    (library,) = cache.iterdir()
    finished = library.rename(tmp_path / "finished.so")
    (tmp_path / "calls").unlink()
    has_waited = threading.Event()
    monkeypatch.setattr(time, "sleep", lambda _: has_waited.set())
    loading = threading.Thread(target=load_kernels, args=(cache, cxx))
    other = os.open(cache, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    loading.start()
    assert has_waited.wait(10.0)
    finished.rename(library)
    os.close(other)
    loading.join(10.0)
    assert not loading.is_alive() and not (tmp_path / "calls").exists()


@needs_a_compiler
def test_a_file_system_without_locks_does_not_keep_it_from_compiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert load_kernels(tmp_path / "cache", copying_compiler(tmp_path)).baton_attend


@needs_a_compiler
def test_of_two_builds_at_once_all_load_the_first_one_that_was_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cxx, first = copying_compiler(tmp_path), tmp_path / "first.so"
    shutil.copy(real_library(), first)
    publish = cpu_build._publish

    def late(built: Path, library: Path) -> None:
        library.hardlink_to(first)
        publish(built, library)

    monkeypatch.setattr(cpu_build, "_publish", late)
    assert Path(load_kernels(tmp_path / "cache", cxx)._name).samefile(first)


@needs_a_compiler
def test_a_cache_that_cannot_be_written_is_replaced_by_a_directory_for_this_process(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    assert load_kernels(occupied / "cache", copying_compiler(tmp_path)).baton_attend


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(KernelsUnavailableError, match="no such flag"):
        load_kernels(tmp_path / "cache", compiler(tmp_path, "echo no such flag >&2; exit 1"))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_compiler_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, timeout: float, **__: object) -> None:
        raise subprocess.TimeoutExpired("g++", timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(KernelsUnavailableError, match="longer than"):
        load_kernels(tmp_path / "cache", compiler(tmp_path, ""))


def test_without_a_compiler_the_twins_serve_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unavailable() -> None:
        raise KernelsUnavailableError("no C++ compiler (g++) was found")

    monkeypatch.setattr(selection, "load_kernels", unavailable)
    with caplog.at_level(logging.WARNING):
        assert isinstance(attention_backend(CPU, torch.bfloat16), ReferenceAttention)
        assert layer_kernels(CPU, torch.bfloat16) is reference_layers
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@needs_a_compiler
def test_the_cpu_gets_the_library_and_odd_dtypes_the_twin() -> None:
    assert isinstance(attention_backend(CPU, torch.float32), CpuAttention)
    assert isinstance(attention_backend(CPU, torch.float64), ReferenceAttention)

"""Compiled kernels for tests whose processes have an empty cache: to compile them takes 14 CPU seconds each time."""

import contextlib
from pathlib import Path

from baton_serve.contracts.model_path import cache_folder, process_cache_folder
from baton_serve.engine.kernels.cpu.build import KernelsUnavailableError, load_kernels


def link_kernels(cache_home: Path) -> None:
    """Let processes whose XDG_CACHE_HOME is `cache_home` find this user's compiled kernels. Does nothing the second
    time. All other parts of their cache stay apart."""
    with contextlib.suppress(KernelsUnavailableError):
        load_kernels()
    own = cache_folder({"XDG_CACHE_HOME": str(cache_home)}) / "kernels"
    own.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        own.symlink_to(process_cache_folder() / "kernels")

"""Records the engine's thread and its device between `/start_profile` and `/stop_profile`, as a trace of torch's
profiler.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch

from baton_serve.engine.errors import ConfigError, UsageError


class TorchProfiler:
    """Records the engine's work with torch's profiler between `start` and `stop`, which must be called in the engine's
    thread.

    Of several ranks only rank 0 is recorded; the others are processes of their own.
    """

    def __init__(self) -> None:
        self._profile: Any = None
        self._folder = Path()

    def start(self, folder: Path, device: torch.device) -> None:
        """Start a recording of the CPU and of `device`, which `stop` writes to `folder`. Raises `UsageError` if a
        recording runs already, and `ConfigError` if the folder cannot be made."""
        if self._profile is not None:
            raise UsageError("the profiler is running: stop it first")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigError(f"cannot write profiles to {folder}: {exc.strerror or exc}") from exc
        kinds = {"cuda": "CUDA", "xpu": "XPU"}
        # Old builds of torch lack the kind of other devices, so it is looked up only if it is needed.
        activities = [torch.profiler.ProfilerActivity.CPU]
        if (kind := kinds.get(device.type)) is not None:
            activities.append(getattr(torch.profiler.ProfilerActivity, kind))
        self._folder, self._profile = folder, torch.profiler.profile(activities=activities)
        self._profile.start()

    def close(self) -> None:
        """End a recording, if one runs, and write nothing. torch has one profiler in a process, which a later engine
        may need."""
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()

    def stop(self) -> Path:
        """End the recording, write the trace and return its path. Raises `UsageError` if no recording runs."""
        if self._profile is None:
            raise UsageError("the profiler is not running: start it first")
        # Cleared first: if the file cannot be written, the profiler must not count as running.
        profile, self._profile = self._profile, None
        profile.stop()
        # With the process, since instances of one host may stop in the same millisecond.
        file = self._folder / f"engine-{time.time_ns() // 1_000_000}-{os.getpid()}.pt.trace.json"
        profile.export_chrome_trace(str(file))
        return file

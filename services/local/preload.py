"""Imported once by the fork server (launches.py), for all instances of a cluster on CPUs: what takes them seconds each.

Nothing may start a thread meanwhile, for a fork would have it no more: numpy's products are told to stay in one.
"""

import gc
import os
import threading
from pathlib import Path

from tqdm import tqdm

from baton_serve.services.instance.settings import short_waits

gc.disable()  # imports make few cycles, and looking for them takes a tenth of the time; forks enable it again
os.environ.update(short_waits(os.environ) | {"OPENBLAS_NUM_THREADS": "1"})

import baton_serve.services.instance.process  # noqa: E402

__all__ = ["baton_serve", "is_fit_to_fork"]


def is_fit_to_fork() -> bool:
    """Nothing but the main thread runs here."""
    return len(list(Path("/proc/self/task").iterdir())) == 1


# Else each fork makes a semaphore among processes for its progress bars, which one that is killed leaves behind.
tqdm.set_lock(threading.RLock())

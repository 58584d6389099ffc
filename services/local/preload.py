"""Imported once by the fork server of `launches`, so that instances on CPUs need not import torch themselves.

These imports must not start threads: a fork copies only the thread that forks, and locks that others hold stay locked.
Therefore OpenBLAS, which numpy uses, is limited to one thread.
"""

import gc
import os
import threading
from pathlib import Path

from tqdm import tqdm

from baton_serve.services.instance.settings import short_waits

# Imports create few cycles, and the collector would take a tenth of their time. Each fork enables it again.
gc.disable()
os.environ.update(short_waits(os.environ) | {"OPENBLAS_NUM_THREADS": "1"})

import baton_serve.services.instance.instance_process  # noqa: E402

__all__ = ["baton_serve", "is_fit_to_fork"]


def is_fit_to_fork() -> bool:
    """Return whether this process runs only one thread. Forking it with several could leave locks held for ever."""
    return len(list(Path("/proc/self/task").iterdir())) == 1


# Without a lock of its own, tqdm would create a semaphore between processes in each fork, and a fork that is killed
# would leave it behind.
tqdm.set_lock(threading.RLock())

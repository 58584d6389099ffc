"""Is the process of a peer on this host still there? A pidfd answers at once, whatever its sockets say."""

import asyncio
import os
import select
from collections.abc import Callable

from baton_serve.kvtransfer.frames import Host


def this_host() -> Host:
    """Identity of this kernel and process. Processes with equal boot ids can share memory."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot_id = file.read().strip()
    return Host(boot_id, os.readlink("/proc/self/ns/pid"), os.getpid())


class ProcessWatch:
    """Calls `on_death` once when the process ends. `close()` before it is forgotten."""

    def __init__(self, pidfd: int, on_death: Callable[[], None]) -> None:
        self._fd = pidfd
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pidfd, self._died)

    def is_dead(self) -> bool:
        if self._fd < 0:
            return True
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _died(self) -> None:
        self.close()
        self._on_death()


def watch_process(peer: Host, mine: Host, on_death: Callable[[], None]) -> ProcessWatch | None:
    """None: the peer is not visible here (another host or pid namespace), or it is this process."""
    if (peer.boot_id, peer.pid_namespace) != (mine.boot_id, mine.pid_namespace) or peer.pid == mine.pid:
        return None
    try:
        return ProcessWatch(os.pidfd_open(peer.pid), on_death)
    except OSError:
        return None

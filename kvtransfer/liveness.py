"""Detects the death of a peer process on the same host through a pidfd, which reports it immediately even if sockets
still seem alive.
"""

import asyncio
import os
import select
from collections.abc import Callable

from baton_serve.kvtransfer.control_messages import Host


def this_host() -> Host:
    """Return the identity of this process and of the kernel under which it runs. Processes with equal `boot_id` can
    share memory.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot_id = file.read().strip()
    return Host(boot_id, os.readlink("/proc/self/ns/pid"), os.getpid())


class ProcessWatch:
    """Watches one process through a pidfd, which it owns. It calls `on_death` once, on the event loop, when the process
    ends. Call `close` to stop watching; it closes the pidfd.
    """

    def __init__(self, pidfd: int, on_death: Callable[[], None]) -> None:
        # The descriptor becomes readable when the process ends. It is not inherited by another process with the same
        # pid.
        self._fd = pidfd
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pidfd, self._died)

    def is_dead(self) -> bool:
        """Return whether the watched process has ended, or `close` was called. The kernel is asked, so the result may
        be True before `on_death` was called.
        """
        if self._fd < 0:
            return True
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        # Ask the kernel: the event loop may not have run its callback yet.
        return bool(poll.poll(0))

    def close(self) -> None:
        """Stop watching and close the pidfd. A second call does nothing."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _died(self) -> None:
        self.close()
        self._on_death()


def watch_process(peer: Host, mine: Host, on_death: Callable[[], None]) -> ProcessWatch | None:
    """Watch the process of `peer` from this process, whose identity is `mine`; `on_death` is called on the event loop
    when it ends. Return None if it cannot be watched: it runs on another host or in another pid namespace, it is this
    process, or it has already ended.
    """
    # In another pid namespace the same number may belong to an unrelated process, whose end would be taken for the
    # peer's.
    if (peer.boot_id, peer.pid_namespace) != (mine.boot_id, mine.pid_namespace) or peer.pid == mine.pid:
        return None
    try:
        return ProcessWatch(os.pidfd_open(peer.pid), on_death)
    except OSError:
        return None

"""Runs the ranks of a host other than the first, and starts them again when the instance has ended.

The first host (`--node-rank 0`) has everything else of the instance. When it stops, sleeps or loses a host, the ranks
here end. New ones then wait for it, so that the instance forms again when all hosts are there.
"""

import contextlib
import logging
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import cast

import msgspec

from baton_serve.child_command import module_command
from baton_serve.contracts.instance import Role
from baton_serve.services.common.cluster_key import read_cluster_key
from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.logs import configure_logs
from baton_serve.services.common.process_lifecycle import EXIT_FAILURE, EXIT_HOPELESS
from baton_serve.services.common.restart_policy import RestartPolicy
from baton_serve.services.common.settings.configuration import log_notes, stop
from baton_serve.services.instance.errors import StartFailed
from baton_serve.services.instance.nodes.agreement import EXIT_ALONE, check_nodes, rank_job
from baton_serve.services.instance.settings import InstanceSettings

logger = logging.getLogger(__name__)


def run_node(settings: InstanceSettings, role: Role, *, notes: Sequence[str] = ()) -> int:
    """Run this host's ranks until SIGTERM or SIGINT, and return the exit status of the process.

    The status is 1 if the first host was not there for too long, and 2 if it refuses this host: a restart helps in the
    first case only. `notes` are those of `load_with`.
    """
    configure_logs(level=settings.log_level, format=settings.log_format, config_file=settings.log_config_file)
    log_notes(notes, settings.log_level)
    try:
        check_nodes(settings, role)
        read_cluster_key(settings.cluster_key_file)
    except (StartFailed, ConfigurationError) as exc:
        stop(f"baton {role}", str(exc))
    return NodeRanks(settings).run()


class NodeRanks:
    """Runs the ranks of one host. Not for the first host, whose ranks belong to its engine."""

    def __init__(self, settings: InstanceSettings) -> None:
        self._settings = settings
        first = settings.node_rank * settings.devices_per_node
        self._ranks = range(first, first + settings.devices_per_node)
        self._restarts = RestartPolicy()
        # A signal writes to the pipe, which ends the wait for processes.
        self._stopped, self._stop = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> int:
        """Start the ranks again and again. Return the exit status of this process."""
        signal.set_wakeup_fd(self._stop, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        while True:
            started_at = time.monotonic()
            status = self._run_once()
            if status is None:
                logger.info("stopping: the ranks of this host have ended")
                return 0
            if status in (EXIT_ALONE, EXIT_HOPELESS):
                return EXIT_FAILURE if status == EXIT_ALONE else EXIT_HOPELESS
            delay_s = self._restarts.next_delay_s(lived_s=time.monotonic() - started_at, has_served=True)
            logger.warning("the instance has ended; the ranks of this host start again in %g s", delay_s)
            if self._wait([], delay_s) is not None:
                return 0

    def _run_once(self) -> int | None:
        """Run all ranks until one of them exits. Return its status, or None after a signal."""
        processes = [self._start(rank) for rank in self._ranks]
        pidfds = [os.pidfd_open(process.pid) for process in processes]
        try:
            ended = self._wait(pidfds)
            return None if ended == self._stopped else processes[pidfds.index(cast(int, ended))].wait()
        finally:
            # The instance has lost a rank, so the others are of no use any more.
            for process, pidfd in zip(processes, pidfds, strict=True):
                process.kill()
                process.wait()
                os.close(pidfd)

    def _wait(self, descriptors: list[int], timeout_s: float | None = None) -> int | None:
        """Return the first descriptor that becomes readable, among them the one for signals; None after the time."""
        poll = select.poll()
        for descriptor in (self._stopped, *descriptors):
            poll.register(descriptor, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll(None if timeout_s is None else 1000 * timeout_s)]
        return min(ready, key=(self._stopped, *descriptors).index, default=None)

    def _start(self, rank: int) -> "subprocess.Popen[bytes]":
        """Start the process of one rank."""
        command = module_command("baton_serve.services.instance.nodes.remote_rank", str(os.getpid()))
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert process.stdin is not None
        # Through a pipe: every user of the machine can read command lines. A rank may exit before it reads.
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(msgspec.json.encode(rank_job(self._settings, rank)))
        return process

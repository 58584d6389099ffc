"""Runs a rank on another host than rank 0: `python -m baton_serve.services.instance.nodes.remote_rank PID`.

It is started by process PID (`node.py`), gets a `RankJob` on stdin, and ends with that process. It connects to the
first host, executes the commands of rank 0, and exits when that connection ends.
"""

import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence

import msgspec

from baton_serve.engine.parallel.channel import Channel, ChannelError
from baton_serve.engine.parallel.tp_worker import TPWorker, end_with, run_rank
from baton_serve.services.common.cluster_key import ClusterKey, read_cluster_key
from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.logs import configure_logs
from baton_serve.services.common.process_lifecycle import EXIT_HOPELESS, print_error
from baton_serve.services.common.rpc.encryption import tls_context
from baton_serve.services.instance.errors import StartFailed
from baton_serve.services.instance.nodes.agreement import (
    EXIT_ALONE,
    RankHello,
    RankJob,
    RankRefused,
    RankWelcome,
    notice_silence,
)

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
"""Longest time in seconds of one attempt to reach the first host."""
RETRY_INTERVAL_S = 0.5
"""Time in seconds between two attempts."""
REPORT_INTERVAL_S = 10.0
"""Time in seconds between two log lines about the first host, if it does not answer."""
GRACE_S = 1.0
"""Seconds that a rank has to end by itself when its connection has ended."""


def main(arguments: Sequence[str]) -> int:
    """Run the rank, and return its exit status: 0 after the first host has closed the connection."""
    # Ctrl-C is for the process of this host, which ends this one afterwards.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with, args=(int(arguments[0]),), daemon=True).start()
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=RankJob)
    configure_logs(level=job.log_level, format=job.log_format, config_file=job.log_config_file)
    try:
        key = read_cluster_key(job.cluster_key_file)
        assert key is not None  # `check_nodes` requires it
        connection, first_model = join(job, key)
    except (StartFailed, ConfigurationError) as exc:
        print_error(f"baton rank {job.rank}", exc)
        return EXIT_HOPELESS
    except TimeoutError as exc:
        print_error(f"baton rank {job.rank}", exc)
        return EXIT_ALONE
    logger.info("rank %d has joined the instance at %s", job.rank, job.place)
    threading.Thread(target=_end_with_connection, args=(connection.fileno(),), daemon=True).start()
    return run_rank(connection, lambda channel: TPWorker(channel, {first_model: job.model}))


def join(job: RankJob, key: ClusterKey) -> tuple[socket.socket, str]:
    """Connect a rank to the first host. Return the connection, and the path of the model on that host.

    Raises `TimeoutError` if it does not answer within `--node-wait-s`, and `StartFailed` if it refuses this rank.
    """
    deadline, report_at = time.monotonic() + job.node_wait_s, time.monotonic() + 1.0
    while True:
        try:
            return _join_once(job, key)
        except (OSError, ChannelError) as exc:
            reason = str(exc)
        if time.monotonic() >= deadline:
            raise TimeoutError(
                f"the host with --node-rank 0 did not answer at {job.place} within {job.node_wait_s:g} s"
                f" (--node-wait-s): {reason}"
            )
        if time.monotonic() >= report_at:
            logger.info("rank %d waits for the host with --node-rank 0 at %s: %s", job.rank, job.place, reason)
            report_at += REPORT_INTERVAL_S
        time.sleep(RETRY_INTERVAL_S)


def _join_once(job: RankJob, key: ClusterKey) -> tuple[socket.socket, str]:
    """Try once to connect. Raises `OSError` or `ChannelError` if the first host does not answer."""
    # Both ends say which messages they expect, and nothing is read before the first host has proved its key.
    answers = RankWelcome | RankRefused
    connection = socket.create_connection((job.master_addr, job.master_port), CONNECT_TIMEOUT_S)
    try:
        notice_silence(connection)
        connection = tls_context(key, is_server=False).wrap_socket(connection)
        channel: Channel[RankWelcome | RankRefused] = Channel(connection, answers, send_timeout_s=CONNECT_TIMEOUT_S)
        channel.send(channel.encode(RankHello(job.rank, job.instance)))
        answer = channel.receive(CONNECT_TIMEOUT_S)
    except BaseException:
        connection.close()
        raise
    if isinstance(answer, RankRefused):
        connection.close()
        raise StartFailed(f"the host with --node-rank 0 refuses this one: {answer.reason}")
    return connection, answer.model


def _end_with_connection(descriptor: int) -> None:
    """Wait for the end of the connection to rank 0, and end this process. Run in a thread.

    The rank's own thread may wait in a collective for a host that does not answer any more.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    poll.poll()
    time.sleep(GRACE_S)
    os._exit(0)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # not sys.exit: device libraries may wait for ranks that have exited

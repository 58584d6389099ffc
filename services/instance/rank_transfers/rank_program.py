"""Runs the process of a rank other than 0 that also moves its part of KV blocks.

It executes the commands of rank 0's engine, as `engine.parallel.tp_worker` alone does, and moves its part of KV blocks
between instances.
"""

import os
import socket
import sys
from collections.abc import Sequence

from baton_serve.engine.parallel import tp_worker
from baton_serve.engine.parallel.channel import Channel
from baton_serve.engine.parallel.commands import Command
from baton_serve.engine.parallel.part_links import OwnPart


def main(arguments: Sequence[str]) -> int:
    """Run the rank, and return its exit status. `arguments` are those of `tp_worker.main`."""
    return tp_worker.main(arguments, make_worker)


def make_worker(channel: Channel[Command]) -> tp_worker.TPWorker:
    """Load a rank's part of a model, as the first command on `channel` says, and return what executes the others."""
    return tp_worker.TPWorker(channel, serve_part=_serve_part)


def _serve_part(connection: socket.socket, part: OwnPart) -> None:
    # Imported here: only ranks with memory of their own need the package of transfers.
    from baton_serve.services.instance.rank_transfers.part_server import serve_part

    serve_part(connection, part)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # not sys.exit: device libraries may wait for ranks that have exited

"""Entry point of one of several router processes (`--workers`): read the assignment, serve, report readiness.

The supervisor starts it as a child process. It is not meant to be started by hand.
"""

import sys

import msgspec

from baton_serve.services.common.process_lifecycle import Lifecycle, run
from baton_serve.services.router.main import PROGRAM, prepare, start
from baton_serve.services.router.processes.router_supervisor import READY, ProcessAssignment
from baton_serve.services.router.protocol.errors import ModelFolderError
from baton_serve.services.router.settings import RouterSettings


def main() -> int:
    """Run one of the processes of a router with several (`--workers`). Serve until SIGTERM and return the exit
    status.
    """
    # Not by flags: settings contain secrets such as API keys, and other users can see the command lines of processes.
    assignment = msgspec.json.decode(sys.stdin.buffer.read(), type=ProcessAssignment)
    settings = RouterSettings(**assignment.settings)  # type: ignore[arg-type]
    prepare(settings)

    async def serve(lifecycle: Lifecycle) -> None:
        await start(settings, lifecycle, assignment.worker)
        # Only now: the supervisor counts a process as started once it can serve requests.
        sys.stdout.buffer.write(READY)
        sys.stdout.buffer.flush()

    return run(serve, program=PROGRAM, expected=(ModelFolderError,))


if __name__ == "__main__":
    sys.exit(main())

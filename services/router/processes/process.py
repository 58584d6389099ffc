"""One worker: reads its assignment, serves, and says on standard output when it does."""

import sys

import msgspec

from baton_serve.services.common.lifecycle import Lifecycle, run
from baton_serve.services.router.main import PROGRAM, prepare, start
from baton_serve.services.router.processes.supervisor import READY, ProcessAssignment
from baton_serve.services.router.protocol.errors import ModelFolderError
from baton_serve.services.router.settings import RouterSettings


def main() -> int:
    assignment = msgspec.json.decode(sys.stdin.buffer.read(), type=ProcessAssignment)
    settings = RouterSettings(**assignment.settings)  # type: ignore[arg-type]
    prepare(settings)

    async def serve(lifecycle: Lifecycle) -> None:
        await start(settings, lifecycle, assignment.worker)
        sys.stdout.buffer.write(READY)
        sys.stdout.buffer.flush()

    return run(serve, program=PROGRAM, expected=(ModelFolderError,))


if __name__ == "__main__":
    sys.exit(main())

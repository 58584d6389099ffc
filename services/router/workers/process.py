"""One worker: reads its assignment, serves, and says on standard output when it does."""

import sys

import msgspec

from services.common.lifecycle import Lifecycle, run
from services.router.errors import ModelFolderError
from services.router.main import PROGRAM, prepare, start
from services.router.settings import RouterSettings
from services.router.workers.supervisor import READY, Assignment


def main() -> int:
    assignment = msgspec.json.decode(sys.stdin.buffer.read(), type=Assignment)
    settings = RouterSettings(**assignment.settings)  # type: ignore[arg-type]
    prepare(settings)

    async def serve(lifecycle: Lifecycle) -> None:
        await start(settings, lifecycle, assignment.worker)
        sys.stdout.buffer.write(READY)
        sys.stdout.buffer.flush()

    return run(serve, program=PROGRAM, expected=(ModelFolderError,))


if __name__ == "__main__":
    sys.exit(main())

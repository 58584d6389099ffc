"""`baton` with an engine whose steps block for ever in the process whose id stands in the file `HANG_FILE`.

`hanging(file)` starts `baton serve` so, for `Cluster(launch=…)`.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from baton_serve.engine.core.outputs import StepResult
from baton_serve.engine.engine import Engine
from baton_serve.services import cli
from baton_serve.services.local import main as local
from baton_serve.services.local.launches import ProcessLauncher, RunningProcess
from baton_serve.services.local.plan import Process
from tests.forking import forks, run_baton

HANG_FILE = "HANG_FILE"


def hanging(file: Path) -> ProcessLauncher:
    def launch(process: Process, environ: Mapping[str, str], out: int, error: int) -> RunningProcess:
        marked = Process(process.name, [__name__, *process.argv], {HANG_FILE: str(file)})
        return forks()(marked, environ, out, error)

    return launch


def hang(file: Path, pid: int) -> None:
    """Block the next step of a process."""
    written = file.with_suffix(".new")
    written.write_text(str(pid))
    # Renamed, so that no process reads a part of the number.
    written.rename(file)


def main(argv: Sequence[str]) -> None:
    """Run `baton serve`, or an instance that it forks."""
    if argv[0] == "serve":
        local.MODULE = __name__  # type: ignore[attr-defined]
        run_baton(argv)
        return
    file, step = Path(os.environ[HANG_FILE]), Engine.step

    def step_or_hang(engine: Engine) -> StepResult:
        if file.exists() and int(file.read_text()) == os.getpid():
            threading.Event().wait()
        return step(engine)

    Engine.step = step_or_hang  # type: ignore[assignment,method-assign]
    cli.main(argv)

"""An engine thread whose step blocks, in a process of its own: `python -m tests.contract.hanging KIND`.

`waits` blocks without the GIL, as a call that waits for a device; `holds-gil` never releases it.
"""

import asyncio
import ctypes
import sys
import threading
from collections.abc import Sequence

from baton_serve.engine.core.outputs import StepResult
from baton_serve.services.instance.engine_thread import EngineThread
from baton_serve.services.instance.watchdog import step_watchdog
from baton_serve.services.instance.watchdog.step_limit import StepLimit
from baton_serve.services.instance.watchdog.step_watchdog import StepWatchdog
from tests.unit.instance.fakes import FakeEngine

LIMIT_S = 0.5


class HangingEngine(FakeEngine):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def has_work(self) -> bool:
        return True

    def step(self) -> StepResult:
        if self._kind == "holds-gil":
            # Unlike CDLL, PyDLL does not release the GIL during a call.
            ctypes.PyDLL(None).sleep(600)
        threading.Event().wait()
        return StepResult()


def main(argv: Sequence[str]) -> None:
    step_watchdog.FORCED_EXIT_S = 1.0
    asyncio.run(serve(argv[0]))


async def serve(kind: str) -> None:
    watchdog = StepWatchdog(StepLimit(LIMIT_S), program="baton decode", has_exit_timer=True)
    watchdog.device = "device 1 (fake)"
    thread = EngineThread(lambda: HangingEngine(kind), watchdog=watchdog)
    await thread.start()
    thread.attach(on_step_result=lambda _: None, on_stats=lambda _: None, on_broken=lambda _: None)

    def on_hang(_: None) -> None:
        sys.stderr.write("the event loop has reported the hang\n")
        watchdog.reported.set()

    watchdog.start(
        lambda: thread.deliver(on_hang, None),
        lambda: print("the ranks are killed", file=sys.stderr),  # noqa: T201 - read by the test
    )
    thread.post(lambda _: None)
    await asyncio.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])

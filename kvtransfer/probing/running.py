"""Starts a throw-away process, reads its answers until its deadline, then kills and reaps it. Every wait has an end."""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import subprocess
from collections.abc import Sequence

import msgspec

from baton_serve.child_command import module_command
from baton_serve.kvtransfer.ladder import ProbeOutcome, Rung, Verdict
from baton_serve.kvtransfer.probing.plan import OUTPUT_PREFIX, ProbeAddress, ProbePlan, complete
from baton_serve.kvtransfer.settings import TransferSettings
from baton_serve.kvtransfer.transports.oneccl.backends import host_backends

logger = logging.getLogger(__name__)

COMMAND: Sequence[str] = tuple(module_command("baton_serve.kvtransfer.probing.process"))
"""Command line of a probe process."""
MAX_LINE_BYTES = 64 << 10
"""Longest line of output that is read; longer ones are ignored."""
REAP_S = 5.0
"""Seconds to wait for a killed process. A driver may hold it longer."""
REAP_POLL_S = 0.005
"""Interval in seconds at which its end is checked."""
LAST_MOMENT_S = 0.5
"""Seconds between the end of its output and its kill, so that it can exit by itself: its exit status explains what
happened.
"""


class ProbeFailedError(Exception):
    """The process of a probe could not be started, crashed, or did not answer in time. `outcome` is the word for the
    verdict, and the message says why.
    """

    def __init__(self, outcome: ProbeOutcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome: ProbeOutcome = outcome


class ProbeProcess:
    """A separate process that tests transports for a probe, so that a driver that hangs there does not harm the
    instance. The owner must call `end`, otherwise the process and its pipes stay.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        self._transport: asyncio.ReadTransport | None = None
        self._error_output = b""

    @classmethod
    async def start(cls, command: Sequence[str], plan: ProbePlan) -> "ProbeProcess":
        """Start the process with the command line `command` and send it `plan`, the task of the probe. Raises
        `ProbeFailedError` if the process cannot be started.

        A thread starts it, because fork takes long in a process that has mapped much memory.
        """
        spawning = asyncio.ensure_future(asyncio.to_thread(_spawn, command, plan))
        try:
            made = cls(await asyncio.shield(spawning))
        except asyncio.CancelledError:
            # The thread cannot be cancelled: wait for the process that it starts, and kill it.
            with await spawning as unwanted:
                unwanted.kill()
            raise
        except OSError as exc:
            raise ProbeFailedError("unavailable", f"no process could be started: {exc}") from exc
        stdout = made._process.stdout
        assert stdout is not None
        made._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(made._reader), stdout
        )
        return made

    @property
    def is_gone(self) -> bool:
        """Return whether the process has ended and its exit status was collected."""
        return self._process.poll() is not None

    async def answer(self) -> bytes | None:
        """Wait for the next answer of the process, one line of JSON, and return it. Return None if the process has
        closed its output; it has then had half a second to exit by itself.
        """
        while True:
            try:
                line = await self._reader.readline()
            except ValueError:
                # The line was longer than any answer.
                continue
            if not line:
                await self._wait(LAST_MOMENT_S)
                return None
            position = line.find(OUTPUT_PREFIX)
            if position >= 0:
                return line[position + len(OUTPUT_PREFIX) :]
            self._error_output = line.strip() or self._error_output

    async def end(self) -> bool:
        """Kill the process and all processes that it started. Return False if the system could not end it within
        `REAP_S` seconds, because a driver holds it.
        """
        if not self.is_gone:
            with contextlib.suppress(ProcessLookupError):
                # SIGTERM would not do: the process may hang in a driver call that never returns to Python.
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._transport is not None:
            self._transport.close()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        is_gone = await self._wait(REAP_S)
        if not is_gone:
            logger.error("probe process %d cannot be killed: no more probes until it is gone", self._process.pid)
        return is_gone

    def fate(self) -> str:
        """Return how the process ended (exit status or signal) with its last line of output. Call it after `end`."""
        status = self._process.poll()
        output = self._error_output.decode(errors="replace")[-200:]
        how = f"signal {-status}" if status is not None and status < 0 else f"status {status}"
        return f"{how}{output and f': {output}'}"

    async def _wait(self, seconds: float) -> bool:
        for _ in range(int(seconds / REAP_POLL_S)):
            if self.is_gone:
                return True
            await asyncio.sleep(REAP_POLL_S)
        return self.is_gone


class ProbeRunner:
    """Runs the probe processes of a node's producer side or consumer side, and remembers processes that could not be
    killed.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._stuck: list[ProbeProcess] = []
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def is_blocked(self) -> bool:
        """Return whether a process of an earlier probe still exists because it could not be killed: a driver holds it,
        and would hold the process of the next probe too.
        """
        self._stuck = [process for process in self._stuck if not process.is_gone]
        return bool(self._stuck)

    async def serve(self, plan: ProbePlan) -> tuple[ProbeProcess, str]:
        """Start a process that serves the blocks of the probe `plan`, and return (the process, its address). The caller
        must pass the process to `end`. Raises `ProbeFailedError` if it does not start in time or crashes.
        """
        process = await ProbeProcess.start(self._command, plan)
        try:
            async with asyncio.timeout(plan.timeout_s):
                line = await process.answer()
            if line is not None:
                return process, msgspec.json.decode(line, type=ProbeAddress).address
            await self.end(process)
            raise ProbeFailedError("crashed", f"the process ended with {process.fate()}")
        except TimeoutError as exc:
            await self.end(process)
            raise ProbeFailedError("deadline", f"it did not start within {plan.timeout_s:g} s") from exc
        except msgspec.MsgspecError as exc:
            await self.end(process)
            raise ProbeFailedError("crashed", f"it sent an invalid answer: {exc}") from exc
        except BaseException:
            await self.end(process)
            raise

    async def fetch(self, plan: ProbePlan) -> list[Verdict]:
        """Run a process that fetches the blocks of a probe by each transport of the plan. Return one verdict for each,
        also if the process crashes or hangs; it does not raise.
        """
        verdicts: list[Verdict] = []
        outcome: ProbeOutcome = "crashed"
        reason = ""
        try:
            process = await ProbeProcess.start(self._command, plan)
        except ProbeFailedError as exc:
            return complete(plan.rungs, [], exc.outcome, str(exc))
        try:
            async with asyncio.timeout(plan.timeout_s):
                while line := await process.answer():
                    verdicts.append(msgspec.json.decode(line, type=Verdict))
        except TimeoutError:
            outcome, reason = "deadline", f"it did not end within {plan.timeout_s:g} s"
        except msgspec.MsgspecError as exc:
            reason = f"it sent an invalid answer: {exc}"
        finally:
            await self.end(process)
        return complete(plan.rungs, verdicts, outcome, reason or f"the process ended with {process.fate()}")

    async def end(self, process: ProbeProcess) -> None:
        """Kill the process of a probe and the processes that it started, and wait up to `REAP_S` seconds until it has
        ended.

        If the caller is cancelled, the wait continues in the background. A process that has not ended in time prevents
        further probes until it is gone (`is_blocked`).
        """
        ending = asyncio.ensure_future(self._end(process))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        # A cancelled caller must not leave a living process behind.
        await asyncio.shield(ending)

    async def close(self) -> None:
        """Wait until all processes that `end` was called for have ended, or the wait for them was given up. Cancel the
        callers of `serve` and `fetch` first.
        """
        if self._ending:
            await asyncio.wait(self._ending)

    async def _end(self, process: ProbeProcess) -> None:
        if not await process.end():
            self._stuck.append(process)


def _spawn(command: Sequence[str], plan: ProbePlan) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        # A process group of its own, so that `end` also kills processes that libraries have started.
        start_new_session=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already; `answer` and `fate` report that
        process.stdin.write(msgspec.json.encode(plan) + b"\n")
    return process


async def probe_here(source: str, target: str, timeout_s: float, *, command: Sequence[str] = COMMAND) -> list[Verdict]:
    """Probe all transports from the device `source` to the device `target` of this machine, and return a verdict for
    each. Devices have torch's names; an empty string means host memory. Each process may take `timeout_s` seconds.
    """
    rungs = [Rung("usm"), Rung("zeromq")]
    rungs += [Rung("oneccl")] if source else [Rung("oneccl", backend.name) for backend in host_backends()]
    plan = ProbePlan(
        rungs=rungs, settings=TransferSettings(), seed=secrets.randbits(48), timeout_s=timeout_s, device=source
    )
    runner = ProbeRunner(command)
    try:
        process, address = await runner.serve(plan)
    except ProbeFailedError as exc:
        return complete(rungs, [], exc.outcome, f"at the producer: {exc}")
    try:
        return await runner.fetch(msgspec.structs.replace(plan, device=target, address=address))
    finally:
        await runner.end(process)

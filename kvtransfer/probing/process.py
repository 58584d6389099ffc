"""Serves or fetches known bytes in the throw-away process at one end of a probe.

It may hang, abort or be killed at any time. It ends when its time is over or when its parent closes its stdin.
"""

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton_serve.contracts.identity import BlockHash, Generation, InstanceId, TicketId
from baton_serve.contracts.messages import Ticket
from baton_serve.kvtransfer import errors
from baton_serve.kvtransfer.block_memory import BlockMemory
from baton_serve.kvtransfer.ladder import ProbeOutcome, Rung, Verdict
from baton_serve.kvtransfer.node import TransferNode
from baton_serve.kvtransfer.probing.memory import ProbeMemory, content_of, memory_on
from baton_serve.kvtransfer.probing.plan import (
    BLOCK_BYTES,
    LAYOUT,
    NUM_BLOCKS,
    OUTPUT_PREFIX,
    PASSES_DEVICE,
    PASSES_HOST,
    ROUNDS,
    ProbeAddress,
    ProbePlan,
    block_name,
    place_of,
    settings_of,
)

SendAnswer = Callable[[ProbeAddress | Verdict], None]
"""Sends an answer to the parent process."""
SOURCE, TARGET = InstanceId("probe-source"), InstanceId("probe-target")
GENERATION = Generation(1)
NICENESS = 10
"""Priority of the process: an instance that computes on the same cores goes first."""
SHARE = 0.9
"""Fraction of the time limit that the probes themselves may use. The rest is for sending the answers to the parent."""
GRACE_S = 2.0
"""Seconds after the parent's deadline at which the process ends itself. A serving process has one time limit to start
and one more to be fetched from.
"""
OUTCOMES: tuple[tuple[type[BaseException], ProbeOutcome], ...] = (
    (errors.Corrupt, "wrong bytes"),
    (errors.TransferTimeout, "deadline"),
    (TimeoutError, "deadline"),
    (errors.PeerLost, "crashed"),
    (BaseException, "unavailable"),
)
"""Outcome of a probe by the exception that ended it; the first match counts."""


def main() -> None:
    """Read a `ProbePlan` from stdin, serve or fetch blocks as it says, and exit without cleaning up, because a driver
    may hang in the cleanup.
    """
    # Libraries print to stdout. Keep it for answers, and let everything else go to stderr.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    plan = msgspec.json.decode(sys.stdin.buffer.readline(), type=ProbePlan)
    # SIGALRM ends the process even if a driver call never returns to Python.
    signal.setitimer(signal.ITIMER_REAL, plan.timeout_s * (1 if plan.address else 2) + GRACE_S)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(OSError):
        os.nice(NICENESS)

    def answer(value: ProbeAddress | Verdict) -> None:
        answers.write(OUTPUT_PREFIX + msgspec.json.encode(value) + b"\n")
        answers.flush()

    asyncio.run(fetch(plan, answer) if plan.address else serve(plan, answer))
    # A normal exit would run the libraries' cleanup, which may hang; the parent has its answers.
    os._exit(0)


async def serve(plan: ProbePlan, answer: SendAnswer) -> None:
    """Serve the blocks of the probe `plan` to whoever asks for them, until this process is killed. `answer` sends this
    process's address to the parent process.
    """
    memory = memory_on(plan.device, plan.preload)
    memory.write(content_of(plan.seed))
    node = _node(SOURCE, memory, plan, plan.rungs)

    def on_fetch(ticket: Ticket, names: list[BlockHash]) -> None:
        node.open(ticket)
        node.publish(ticket.ticket, [(name, place_of(name)) for name in names])
        node.finish(ticket.ticket, b"")

    await node.start()
    node.on_fetch(on_fetch)
    answer(ProbeAddress(node.address))
    await asyncio.Event().wait()


async def fetch(plan: ProbePlan, answer: SendAnswer) -> None:
    """Fetch the blocks from the serving process by each transport of the plan in turn, compare their bytes with the
    expected ones, and send a verdict for each by `answer`. Each gets an equal share of the remaining time, so time that
    an earlier one did not use goes to the later ones.
    """
    deadline = time.monotonic() + SHARE * plan.timeout_s
    memory = memory_on(plan.device, plan.preload)
    expected = content_of(plan.seed)
    for position, rung in enumerate(plan.rungs):
        # Divide the remaining time equally among the remaining rungs, so that one that hangs leaves time for the
        # others.
        left = max(deadline - time.monotonic(), 0.0) / (len(plan.rungs) - position)
        verdict = await _try(rung, plan, memory, expected, left)
        answer(verdict)
        if verdict.outcome == "crashed":
            return  # the serving process is gone: no later rung can be tried


async def _try(
    rung: Rung, plan: ProbePlan, memory: ProbeMemory, expected: NDArray[np.uint8], timeout_s: float
) -> Verdict:
    node = _node(TARGET, memory, plan, [rung])
    try:
        async with asyncio.timeout(timeout_s):
            await node.start()
            await node.connect(plan.address)
            return await _measure(node, rung, plan, memory, expected)
    except Exception as exc:  # noqa: BLE001 - any failure is a result of the probe
        outcome = next(outcome for kind, outcome in OUTCOMES if isinstance(exc, kind))
        return Verdict(rung, outcome, reason=str(exc) or f"not within {timeout_s:.0f} s")
    finally:
        with contextlib.suppress(Exception):
            await node.close()


async def _measure(
    node: TransferNode, rung: Rung, plan: ProbePlan, memory: ProbeMemory, expected: NDArray[np.uint8]
) -> Verdict:
    """Fetch the blocks of the probe to `node` by the transport `rung`, once to warm up, then several times to measure
    the speed. After each fetch, compare the content of `memory` with `expected`, because checksums of the transport are
    part of what is being tested.
    """
    passes = PASSES_DEVICE if plan.device else PASSES_HOST
    best = 0.0
    for number, count in enumerate([1, *[passes] * ROUNDS]):
        # Without this, the bytes of the last fetch would make a transport that delivers nothing look right.
        memory.write(np.zeros_like(expected))
        names = [block_name(index) for index in range(count * NUM_BLOCKS)]
        began = time.perf_counter()
        ticket = _ticket(f"{rung}-{number}", plan)
        await node.fetch(ticket, [(name, place_of(name)) for name in names], partial=True)
        seconds = time.perf_counter() - began
        if not np.array_equal(memory.content(), expected):
            return Verdict(rung, "wrong bytes", reason="other bytes arrived than were sent")
        if number:
            best = max(best, len(names) * BLOCK_BYTES / seconds)
    return Verdict(rung, "proved", best)


def _node(instance: InstanceId, memory: BlockMemory, plan: ProbePlan, rungs: Sequence[Rung]) -> TransferNode:
    settings = settings_of(plan.settings, rungs, plan.timeout_s)
    return TransferNode(instance=instance, generation=GENERATION, layout=LAYOUT, memory=memory, settings=settings)


def _ticket(name: str, plan: ProbePlan) -> Ticket:
    return Ticket(
        ticket=TicketId(name),
        source=SOURCE,
        source_generation=GENERATION,
        source_address=plan.address,
        sink=TARGET,
        sink_generation=GENERATION,
        timeout_s=plan.timeout_s,
    )


def _end_with_parent() -> None:
    """Wait until stdin closes, then exit this process. The parent keeps stdin open as long as it needs this process; if
    the parent is killed, stdin closes too.
    """
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()

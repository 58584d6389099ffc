"""For `baton doctor`: every transport, between two throw-away processes of this machine, without any instance."""

import secrets
from collections.abc import Sequence

import msgspec

from baton_serve.kvtransfer.ladder import Rung, Verdict
from baton_serve.kvtransfer.probing.plan import ProbePlan, complete
from baton_serve.kvtransfer.probing.running import COMMAND, ProbeFailedError, ProbeRunner
from baton_serve.kvtransfer.settings import TransferSettings
from baton_serve.kvtransfer.transports.oneccl.backends import host_backends


async def probe_here(source: str, target: str, timeout_s: float, *, command: Sequence[str] = COMMAND) -> list[Verdict]:
    """`source` and `target` are devices as torch calls them; empty: host memory. A verdict for each transport."""
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

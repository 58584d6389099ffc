"""Sends known bytes over every transport between two throw-away processes, as two instances do in a probe."""

import importlib
from collections.abc import AsyncIterator
from typing import Any

from baton_serve.services.doctor.device_probe import ProbeFacts
from baton_serve.services.doctor.findings import Finding, note, ok, problem, warning


async def check_transports(facts: ProbeFacts | None, timeout_s: float) -> AsyncIterator[Finding]:
    """Between the first two devices, or one and itself; without any, between host memories."""
    try:
        kvtransfer = importlib.import_module("kvtransfer")
    except ImportError as exc:
        yield note("transports", f"cannot be tried here: {exc}", "instances need: pip install .[worker]")
        return
    source, target = probe_ends(facts)
    for verdict in await kvtransfer.probe_here(source, target, timeout_s):
        yield transport_finding(verdict, f"{source or 'host'} → {target or 'host'}")


def probe_ends(facts: ProbeFacts | None) -> tuple[str, str]:
    if facts is None or not facts.devices:
        return "", ""
    names = [f"{facts.kind}:{device.index}" for device in facts.devices]
    return names[0], names[min(1, len(names) - 1)]


def transport_finding(verdict: Any, pair: str) -> Finding:
    """Of a `kvtransfer.Verdict`. What fails is never used by `--kv-transport auto`; wrong bytes are worth a repair."""
    check, why = f"transport {verdict.rung}", f"{verdict.outcome}{verdict.reason and f', {verdict.reason}'}"
    match verdict.outcome:
        case "proved":
            return ok(check, f"{pair} {verdict.bytes_per_second / 1e9:.1f} GB/s, every byte right")
        case "wrong bytes":
            return problem(
                check, f"{pair} {why}", "set CCL_TOPO_P2P_ACCESS=0; keep --kv-transport auto, which avoids it"
            )
        case "deadline" | "crashed":
            return warning(check, f"{pair} {why}", "keep --kv-transport auto, which avoids it; see the driver's log")
        case _:
            return note(check, f"{pair} {why}")

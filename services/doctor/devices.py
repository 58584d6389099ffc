"""Asks `device_probe` in a throw-away process, with a deadline, and judges what it says."""

import importlib
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from importlib import metadata
from typing import Any

import msgspec

from baton_serve.child_command import module_command
from baton_serve.services.doctor.device_probe import DeviceFacts, PeerFacts, ProbeFacts
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


SLOW_COPY_BYTES_PER_S = 4e9
PROBE = module_command("baton_serve.services.doctor.device_probe")


def check_devices(timeout_s: float, command: Sequence[str] = PROBE) -> Iterator[Finding]:
    facts = probe_devices(timeout_s, command)
    if isinstance(facts, Finding):
        yield facts
    else:
        yield from device_findings(facts)


def probe_devices(timeout_s: float, command: Sequence[str] = PROBE) -> ProbeFacts | Finding:
    """What torch says, or why it says nothing."""
    if _version("torch") is None:
        return note("torch", "not installed: this machine can run a router", "instances need: pip install .[worker]")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return problem(
            "devices",
            f"the driver did not answer within {timeout_s:g} s",
            "reboot or reload the kernel module; see `dmesg`; show one card alone with ZE_AFFINITY_MASK=0",
        )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return problem(
            "devices",
            f"torch cannot use this machine: {last}",
            "see `python -m baton_serve.services.doctor.device_probe`",
        )
    return msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=ProbeFacts)


def device_findings(facts: ProbeFacts) -> Iterator[Finding]:
    features = ", ".join(name for name, is_there in facts.features.items() if is_there) or "none"
    yield ok("torch", f"{facts.torch} with device {facts.kind}; features: {features}")
    if facts.kind == "cpu":
        yield note("devices", "torch sees no accelerator: instances run on the CPU", _cpu_remedy(facts.torch))
        return
    for device in facts.devices:
        yield ok("devices", f"{facts.kind}:{device.index} {device.name}, {device.memory_bytes / 2**30:.1f} GiB")
        yield _copy_speed(facts.kind, device)
    for peer in facts.peers:
        yield _peer(facts.kind, peer)


def _copy_speed(kind: str, device: DeviceFacts) -> Finding:
    slower = min(device.pinned_to_device, device.device_to_pinned)
    text = (
        f"{kind}:{device.index} {device.pinned_to_device / 1e9:.1f} GB/s in, "
        f"{device.device_to_pinned / 1e9:.1f} GB/s out, pinned"
    )
    if slower >= SLOW_COPY_BYTES_PER_S:
        return ok("copies", text)
    return warning(
        "copies", text, "check the slot's width (lspci -vv: LnkSta), ReBAR, and that memory really is pinned"
    )


def _peer(kind: str, peer: PeerFacts) -> Finding:
    pair = f"{kind}:{peer.source} → {kind}:{peer.target}"
    if not peer.is_intact:
        return problem(
            "peer copies",
            f"{pair} arrived with other bytes than were sent",
            "set CCL_TOPO_P2P_ACCESS=0 and keep --kv-transport at auto, usm or zeromq: they go through host memory",
        )
    said = {True: "direct", False: "through host memory", None: "path unknown"}[peer.can_access]
    return ok("peer copies", f"{pair} {peer.bytes_per_second / 1e9:.1f} GB/s, verified ({said})")


def _cpu_remedy(version: str) -> str:
    if version.endswith("+cpu"):
        return (
            "this is torch's CPU build; on Arc install the XPU wheels: make setup TORCH_INDEX=<index of the XPU wheels>"
        )
    return "on Arc: install the compute runtime (libze1, libze-intel-gpu1) and the XPU wheels of torch"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

"""Tests torch, accelerators and transports in a child process, and decides what is a problem or a warning.

`device_probe` and the transports' probes run in child processes with a deadline, because a broken driver may hang.
"""

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
    """Test every transport for KV blocks and yield a finding for each. `facts` are those of `device_probe`, or None if
    it was not run. Each test may take `timeout_s` seconds.

    Blocks are sent between the first two devices. If the machine has only one device, they are sent from it to itself,
    and without any device between two places of host memory.
    """
    # kvtransfer needs packages of instances, which a machine that only runs a router may lack.
    try:
        kvtransfer = importlib.import_module("baton_serve.kvtransfer")
    except ImportError as exc:
        yield note("transports", f"not checked: {exc}", "only for instances: pip install 'baton-serve[worker]'")
        return
    source, target = probe_ends(facts)
    for verdict in await kvtransfer.probe_here(source, target, timeout_s):
        yield transport_finding(verdict, f"{source or 'host'} → {target or 'host'}")


def probe_ends(facts: ProbeFacts | None) -> tuple[str, str]:
    """Return the two devices (source, target) between which transports are tested, by torch's names. Two empty strings
    mean host memory.
    """
    if facts is None or not facts.devices:
        return "", ""
    names = [f"{facts.kind}:{device.index}" for device in facts.devices]
    return names[0], names[min(1, len(names) - 1)]


def transport_finding(verdict: Any, pair: str) -> Finding:
    """Convert `verdict`, the `kvtransfer.Verdict` of one transport, to a finding. `pair` names the two devices in its
    text.

    A transport that fails is harmless, because `--kv-transport auto` never uses it. Only wrong bytes are a problem:
    they show a fault of the machine.
    """
    check, why = f"transport {verdict.rung}", f"{verdict.outcome}{verdict.reason and f', {verdict.reason}'}"
    match verdict.outcome:
        case "proved":
            return ok(check, f"{pair} {verdict.bytes_per_second / 1e9:.1f} GB/s, every byte correct")
        case "wrong bytes":
            return problem(
                check,
                f"{pair} {why}",
                "set CCL_TOPO_P2P_ACCESS=0, and keep --kv-transport auto, which does not use this transport",
            )
        case "deadline" | "crashed":
            return warning(
                check,
                f"{pair} {why}",
                "keep --kv-transport auto, which does not use this transport; see `dmesg` for the driver's messages",
            )
        case _:
            return note(check, f"{pair} {why}")


SLOW_COPY_BYTES_PER_S = 4e9
"""Copies between pinned host memory and a device that are slower than this point to a fault."""
PROBE = module_command("baton_serve.services.doctor.device_probe")


def check_devices(timeout_s: float, command: Sequence[str] = PROBE) -> Iterator[Finding]:
    """Test the accelerators in a child process (`command`) for at most `timeout_s` seconds, and yield the findings."""
    facts = probe_devices(timeout_s, command)
    if isinstance(facts, Finding):
        yield facts
    else:
        yield from device_findings(facts)


def probe_devices(timeout_s: float, command: Sequence[str] = PROBE) -> ProbeFacts | Finding:
    """Run `device_probe` as a child process (`command`) for at most `timeout_s` seconds. Return its facts, or a finding
    that says why there are none.
    """
    if _version("torch") is None:
        return note(
            "torch",
            "torch is not installed: this machine can run a router, but no instances",
            "only for instances: pip install 'baton-serve[worker]'",
        )
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return problem(
            "devices",
            f"the driver did not answer within {timeout_s:g} s",
            "see `dmesg`, reload the kernel module or reboot; to find the card, make one visible: ZE_AFFINITY_MASK=0",
        )
    if done.returncode != 0:
        # The last line of a traceback is the error itself.
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return problem(
            "devices",
            f"torch cannot use this machine: {last}",
            "run `python -m baton_serve.services.doctor.device_probe` to see the whole error",
        )
    # Drivers may print lines of their own before the JSON object.
    return msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=ProbeFacts)


def device_findings(facts: ProbeFacts) -> Iterator[Finding]:
    """Yield the findings about torch, each accelerator and the copies between them that follow from `facts`."""
    features = ", ".join(name for name, is_there in facts.features.items() if is_there) or "none"
    yield ok("torch", f"torch {facts.torch} uses the device {facts.kind}; features: {features}")
    if facts.kind == "cpu":
        yield note("devices", "torch finds no accelerator: instances run on the CPU", _cpu_remedy(facts.torch))
        return
    for device in facts.devices:
        driver = f", driver {device.driver}" if device.driver else ""
        yield ok("devices", f"{facts.kind}:{device.index} {device.name}, {device.memory_bytes / 2**30:.1f} GiB{driver}")
        yield _copy_speed(facts.kind, device)
    for peer in facts.peers:
        yield _peer(facts.kind, peer)


def _copy_speed(kind: str, device: DeviceFacts) -> Finding:
    # A handoff copies out of one device and into another, so the slower direction limits it.
    slower = min(device.pinned_to_device, device.device_to_pinned)
    text = (
        f"{kind}:{device.index} copies {device.pinned_to_device / 1e9:.1f} GB/s in, "
        f"{device.device_to_pinned / 1e9:.1f} GB/s out, from and to pinned host memory"
    )
    if slower >= SLOW_COPY_BYTES_PER_S:
        return ok("copies", text)
    return warning(
        "copies", text, "check the width of the card's slot (lspci -vv: LnkSta) and that Resizable BAR is on"
    )


def _peer(kind: str, peer: PeerFacts) -> Finding:
    pair = f"{kind}:{peer.source} → {kind}:{peer.target}"
    if not peer.is_intact:
        return problem(
            "peer copies",
            f"{pair} delivers wrong bytes",
            "set CCL_TOPO_P2P_ACCESS=0, and use --kv-transport auto, usm or zeromq, which copy through host memory",
        )
    path = {True: "direct", False: "through host memory", None: "path unknown"}[peer.can_access]
    return ok("peer copies", f"{pair} {peer.bytes_per_second / 1e9:.1f} GB/s, verified ({path})")


def _cpu_remedy(version: str) -> str:
    if version.endswith("+cpu"):
        return (
            "this is a CPU build of torch; for Arc install the XPU wheels: "
            "make clean setup TORCH_INDEX=https://download.pytorch.org/whl/xpu"
        )
    return "for Arc install the compute runtime (libze1, libze-intel-gpu1) and the XPU wheels of torch"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

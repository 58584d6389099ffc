"""What a throw-away process is told to do, one JSON object on its stdin, and what it answers. Values only."""

from collections.abc import Sequence

import msgspec

from baton_serve.contracts.identity import BlockHash
from baton_serve.contracts.layout import KVLayout
from baton_serve.kvtransfer.ladder import ProbeOutcome, Rung, Verdict
from baton_serve.kvtransfer.settings import TransferSettings

OUTPUT_PREFIX = b"baton-probe "
"""Begins each line that is an answer: libraries print what they like."""
NUM_BLOCKS = 4
BLOCK_BYTES = 4 << 20
ROUNDS = 2
PASSES_HOST, PASSES_DEVICE = 8, 16
"""So many times are all blocks sent to measure the speed: memory stays small, and latency does not count much."""
RING_BYTES = 64 << 20
LAYOUT = KVLayout(
    fingerprint="probe",
    num_layers=BLOCK_BYTES // (2 * 2 * 64 * 16),
    num_kv_heads=1,
    block_tokens=64,
    head_dim=16,
    dtype="bfloat16",
)


class ProbePlan(msgspec.Struct, frozen=True, kw_only=True):
    """`address`: of the process that serves, for the one that fetches; empty: serve.

    `device`: what torch calls it, empty for host memory. `preload`: modules that make the device known to torch.
    """

    rungs: list[Rung]
    settings: TransferSettings
    seed: int
    timeout_s: float
    device: str = ""
    preload: list[str] = []
    address: str = ""


class ProbeAddress(msgspec.Struct, frozen=True):
    address: str


def settings_of(settings: TransferSettings, rungs: Sequence[Rung], timeout_s: float) -> TransferSettings:
    """An instance's own, with little memory and short deadlines. `rungs`: all of one node."""
    scheme, _, rest = settings.bind.partition("://")
    dialects = {rung.dialect for rung in rungs if rung.dialect}
    return msgspec.structs.replace(
        settings,
        bind=f"{scheme}://{rest.rpartition(':')[0]}:*",
        transports=tuple(dict.fromkeys(rung.transport for rung in rungs)),
        oneccl_backend=dialects.pop() if len(dialects) == 1 else settings.oneccl_backend,
        attach_timeout_s=min(settings.attach_timeout_s, timeout_s),
        stall_timeout_s=min(settings.stall_timeout_s, timeout_s),
        ring_bytes=RING_BYTES,
        device_batch_bytes=NUM_BLOCKS * BLOCK_BYTES,
        probe=False,
        parts=1,
    )


def block_name(index: int) -> BlockHash:
    return BlockHash(index.to_bytes(16, "big"))


def place_of(name: BlockHash) -> int:
    """Where a block of this name lies, at both ends."""
    return int.from_bytes(name, "big") % NUM_BLOCKS


def complete(rungs: Sequence[Rung], verdicts: Sequence[Verdict], outcome: ProbeOutcome, reason: str) -> list[Verdict]:
    """One verdict for each rung: the first without one is the one that `outcome` happened to."""
    told = {verdict.rung: verdict for verdict in verdicts}
    made: list[Verdict] = []
    for rung in rungs:
        if rung in told:
            made.append(told[rung])
        else:
            made.append(Verdict(rung, outcome, reason=reason))
            outcome, reason = "skipped", ""
    return made

"""Defines the task of a probe process, one JSON object on its stdin, and its answers. Values only."""

from collections.abc import Sequence

import msgspec

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import BlockHash
from baton_serve.kvtransfer.ladder import ProbeOutcome, Rung, Verdict
from baton_serve.kvtransfer.settings import TransferSettings

OUTPUT_PREFIX = b"baton-probe "
"""Start of each line that is an answer. Libraries may print other lines to the same output."""
NUM_BLOCKS = 4
"""Number of blocks in the memory of a probe process."""
BLOCK_BYTES = 4 << 20
ROUNDS = 2
"""Number of measured fetches for each rung; the fastest counts."""
PASSES_HOST, PASSES_DEVICE = 8, 16
"""How many times a fetch sends all blocks to measure the speed. The memory stays small, and latency has little weight.
"""
RING_BYTES = 64 << 20
"""Size of the pinned ring of a probe in bytes, smaller than that of an instance."""
LAYOUT = KVLayout(
    fingerprint="probe",
    num_layers=BLOCK_BYTES // (2 * 2 * 64 * 16),
    num_kv_heads=1,
    block_tokens=64,
    head_dim=16,
    dtype="bfloat16",
)
"""Layout of the probe's blocks. Its fields only have to give blocks of `BLOCK_BYTES`."""


class ProbePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The task of a probe's process, which tests the transports `rungs` with bytes made from `seed`. Without `address`
    it serves blocks; otherwise it fetches them from the process at this address. `device` is torch's name of the
    device, empty for host memory. `preload` names modules to import first, because they register the device with torch.
    """

    rungs: list[Rung]
    settings: TransferSettings
    seed: int
    timeout_s: float
    device: str = ""
    preload: list[str] = []
    address: str = ""


class ProbeAddress(msgspec.Struct, frozen=True):
    """The first answer of a probe's process that serves blocks: the address from which the blocks can be fetched."""

    address: str


def settings_of(settings: TransferSettings, rungs: Sequence[Rung], timeout_s: float) -> TransferSettings:
    """Return a copy of an instance's transfer settings for the process of a probe: only the transports `rungs`, little
    memory, deadlines of at most `timeout_s`, and no probes of its own.
    """
    scheme, _, rest = settings.bind.partition("://")
    dialects = {rung.dialect for rung in rungs if rung.dialect}
    return msgspec.structs.replace(
        settings,
        # Keep the interface of the instance, which its peers reach, and take any free port.
        bind=f"{scheme}://{rest.rpartition(':')[0]}:*",
        transports=tuple(dict.fromkeys(rung.transport for rung in rungs)),
        # A fetching process probes one rung at a time, so it loads only the backend of that rung.
        oneccl_backend=dialects.pop() if len(dialects) == 1 else settings.oneccl_backend,
        attach_timeout_s=min(settings.attach_timeout_s, timeout_s),
        stall_timeout_s=min(settings.stall_timeout_s, timeout_s),
        ring_bytes=RING_BYTES,
        device_batch_bytes=NUM_BLOCKS * BLOCK_BYTES,
        probe=False,
        parts=1,
    )


def block_name(index: int) -> BlockHash:
    """Return the made-up hash that a probe uses for the block with this index in its fetch."""
    return BlockHash(index.to_bytes(16, "big"))


def place_of(name: BlockHash) -> int:
    """Return the block number at which both probe processes store the block with the hash `name` (from `block_name`). A
    fetch has more hashes than the memory has blocks, so several hashes share a number.
    """
    return int.from_bytes(name, "big") % NUM_BLOCKS


def complete(rungs: Sequence[Rung], verdicts: Sequence[Verdict], outcome: ProbeOutcome, reason: str) -> list[Verdict]:
    """Return one verdict for each of `rungs` (transports with their dialects): that of `verdicts`, or a new one. The
    first rung without a verdict gets `outcome` and `reason`, because the probe ended there; the rungs after it get the
    outcome `skipped`.
    """
    known = {verdict.rung: verdict for verdict in verdicts}
    made: list[Verdict] = []
    for rung in rungs:
        if rung in known:
            made.append(known[rung])
        else:
            made.append(Verdict(rung, outcome, reason=reason))
            # The process ended at the first rung without a verdict; it never tried the rungs behind it.
            outcome, reason = "skipped", ""
    return made

"""Show how a pair of accelerators chooses its transport: handoffs run one after another while the probe runs.

`baton-bench kv-ladder [--devices cuda:0 cuda:1] [--seconds 25] [--peer-access 0|1] [--json]`

Two processes with one device each and `--kv-transport auto`. There is one row for each transport, in order of use:
when its first handoff began, and the speed of its best handoff. Each handoff is verified on the receiving device. The
last rows are the link's own report, as in `/health`. With `cpu` as devices only the code paths are tested.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from baton_serve.bench.report import Row, show
from baton_serve.bench.transfer.cases import MIB
from baton_serve.bench.transfer.devices import DeviceNodePair, default_devices, pair_of, throughput
from baton_serve.bench.transfer.devices_producer import DeviceOrder
from baton_serve.contracts.instance import LinkStatus
from baton_serve.kvtransfer import TransferSettings


@dataclass
class TransportPeriod:
    """Successive handoffs with the same transport."""

    transport: str
    began_s: float
    handoffs: int = 0
    bytes_per_second: float = 0.0


async def watch(pair: DeviceNodePair, num_blocks: int, seconds: float, num_bytes: int) -> list[TransportPeriod]:
    """Run handoffs for `seconds` and return the periods of each transport."""
    digest, began = await pair.order(DeviceOrder(op="digest")), time.perf_counter()
    turns: list[TransportPeriod] = []
    while (elapsed := time.perf_counter() - began) < seconds:
        transport = link_of(pair).transport
        took = await throughput(pair, 1, num_blocks, digest)
        if not turns or turns[-1].transport != transport:
            turns.append(TransportPeriod(transport, elapsed))
        turns[-1].handoffs += 1
        turns[-1].bytes_per_second = max(turns[-1].bytes_per_second, num_bytes / took)
    return turns


def link_of(pair: DeviceNodePair) -> LinkStatus:
    """Return the only link of the consuming node."""
    (link,) = pair.node.links()
    return link


async def measure(options: argparse.Namespace) -> list[Row]:
    settings = msgspec.convert(
        {"transports": ["auto"], "peer_access": options.peer_access, "checksum": options.checksum}, TransferSettings
    )
    num_bytes = options.prompt_mib * MIB
    num_blocks = num_bytes // (options.block_kib << 10)
    async with asyncio.timeout(options.timeout_s), pair_of(options, num_blocks, settings) as pair:
        turns = await watch(pair, num_blocks, options.seconds, num_bytes)
        link = link_of(pair)
    rows = [
        Row("kv-ladder", f"{turn.transport} from {turn.began_s:.1f} s, {turn.handoffs} handoffs", speed / 1e9, "GB/s")
        for turn in turns
        if (speed := turn.bytes_per_second)
    ]
    rows.append(Row("kv-ladder", f"probe of {link.transport}", link.probed_bytes_per_second / 1e9, "GB/s"))
    return [*rows, *(Row("kv-ladder", f"{link.choice}: {line}", 0.0, "") for line in link.reason.split("; "))]


def run(argv: Sequence[str]) -> None:
    """Run `baton-bench kv-ladder` with these arguments."""
    parser = argparse.ArgumentParser(prog="baton-bench kv-ladder", description=__doc__)
    parser.add_argument("--devices", nargs=2, default=default_devices(), help="source and destination device")
    parser.add_argument("--seconds", type=float, default=25.0, help="duration of the measurement")
    parser.add_argument("--peer-access", default="", choices=["", "0", "1"], help="value of CCL_TOPO_P2P_ACCESS")
    parser.add_argument(
        "--checksum", default="sampled", choices=["full", "sampled", "off"], help="checksum mode of the transfer"
    )
    parser.add_argument("--prompt-mib", type=int, default=1024, help="KV of one handoff in MiB")
    parser.add_argument("--block-kib", type=int, default=8192, help="size of a block in KiB")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="seconds after which the benchmark is given up")
    parser.add_argument("--json", action="store_true", help="print one JSON object per row")
    options = parser.parse_args(argv)
    options.scattered = False
    show(asyncio.run(measure(options)), as_json=options.json)

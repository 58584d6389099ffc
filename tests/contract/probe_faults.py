"""A temporary process of a probe with a fault: `python -m tests.contract.probe_faults FAULT`.

`hang`, `abort` and `exit` happen while the fetching end attaches `usm`, where a deadline inside the process cannot
help. `corrupt` changes a byte of each block after its checksum was compared. `mute` never reports its address;
`babble` reports something that cannot be parsed.
"""

import ctypes
import os
import sys
from collections.abc import Sequence

from baton_serve.kvtransfer.control_messages import Offer, Welcome
from baton_serve.kvtransfer.probing import process
from baton_serve.kvtransfer.session.steps import BlockPlacement
from baton_serve.kvtransfer.transports.memory import HostReceiver
from baton_serve.kvtransfer.transports.port import Receiver
from baton_serve.kvtransfer.transports.usm import UsmTransport

FOREVER_S = 600
receive_all = HostReceiver.receive_all


async def hang(self: UsmTransport, welcome: Welcome, offer: Offer, target: object) -> Receiver:
    """With Python's lock held, as a driver might."""
    ctypes.PyDLL(None).sleep(FOREVER_S)
    raise AssertionError


async def abort(self: UsmTransport, welcome: Welcome, offer: Offer, target: object) -> Receiver:
    os.abort()


async def leave(self: UsmTransport, welcome: Welcome, offer: Offer, target: object) -> Receiver:
    sys.stderr.write("the driver says goodbye\n")
    sys.stderr.flush()
    os._exit(3)


def corrupt(self: HostReceiver, placements: Sequence[BlockPlacement]) -> list[bool]:
    right = receive_all(self, placements)
    for placement in placements:
        self._target.view(placement.destination)[7] ^= 1
    return right


async def stay_silent(plan: object, answer: object) -> None:
    ctypes.PyDLL(None).sleep(FOREVER_S)


def main(fault: str) -> None:
    match fault:
        case "hang" | "abort" | "exit":
            struck = {"hang": hang, "abort": abort, "exit": leave}[fault]
            UsmTransport.attach = struck  # type: ignore[method-assign]
        case "corrupt":
            HostReceiver.receive_all = corrupt  # type: ignore[method-assign]
        case "mute":
            process.serve = stay_silent
        case "babble":
            sys.stdout.write("baton-probe what?\n")
            sys.stdout.flush()
        case _:
            raise ValueError(fault)
    process.main()


if __name__ == "__main__":
    main(sys.argv[1])

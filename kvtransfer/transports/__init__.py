"""How bytes travel: one file per transport, all behind `port`. `build` makes the ones a node may use."""

from baton_serve.kvtransfer.settings import TransferSettings
from baton_serve.kvtransfer.transports.memory import InProcess, MemoryTransport
from baton_serve.kvtransfer.transports.oneccl.transport import OneCclTransport
from baton_serve.kvtransfer.transports.port import NodeFacts, Transport
from baton_serve.kvtransfer.transports.usm import UsmTransport
from baton_serve.kvtransfer.transports.zeromq import ZeromqTransport


def build(facts: NodeFacts, settings: TransferSettings, in_process: InProcess | None) -> dict[str, Transport]:
    """In order of preference. `memory` is left out where nobody shares an `InProcess`."""
    made: dict[str, Transport] = {}
    for name in settings.ladder(is_device=facts.memory.host_view is None):
        match name:
            case "memory":
                if in_process is not None:
                    made[name] = MemoryTransport(facts, settings, in_process)
            case "usm":
                made[name] = UsmTransport(facts, settings)
            case "zeromq":
                made[name] = ZeromqTransport(facts, settings)
            case "oneccl":
                made[name] = OneCclTransport(facts, settings)
            case _:
                raise ValueError(f"no transport is named {name!r}")
    return made

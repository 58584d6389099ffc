"""The transports: the ways in which the bytes of blocks travel, all behind the interface `port.Transport`.

`build` is the registry. Adding a transport takes these steps:

 1. Implement `port.Transport`, with its `Sender` and `Receiver`, in `transports/NAME.py` or a package of this name.
 2. Import it here, and add a `case` for its name to `build`.
 3. Add the name to `TransportName` in `kvtransfer/settings.py`. If `auto` may use it without a probe, insert it into
    `LADDER` there, best first. `PROBED` names the only transport that `auto` uses after a probe: a second one also
    needs changes in `TransferSettings.ladder`, `unproved` and `forced`, and in `services/instance/metrics.py`, whose
    labels are made from `LADDER` and `PROBED`. A transport inside one process must be added to `UNSEEN` in
    `kvtransfer/ladder.py`.
 4. Offer the name to users: `Transport` and the description of `kv_transport` in
    `services/instance/settings/handoff_network_cpu.py`, the remedies in `services/instance/instance_process.py` and
    `services/local/main.py`, and for `baton doctor` the rungs in `probe_here` (`kvtransfer/probing/running.py`).
 5. Add it to the enum of `kvTransfer.transport` in `tools/helm_schema.py` and to its comment in `helm/values.yaml`.
    Then generate `helm/values.schema.json` and `helm/README.md` again.
 6. Add the name to the parameters of the contract tests: `TRANSPORTS` in `tests/contract/test_transports.py`,
    `test_transports_parts.py`, `test_transports_devices.py` and `test_conversion.py`, and the fixtures in
    `test_transport_faults.py` and `test_transports_processes.py`.
 7. Describe it in `docs/reference/protocol.md` and, if users should know it, in `docs/architecture.md`.

Messages need no change: they carry the name as text, and peers use the transports that both ends have.
"""

from baton_serve.kvtransfer.settings import TransferSettings
from baton_serve.kvtransfer.transports.memory import InProcess, MemoryTransport
from baton_serve.kvtransfer.transports.oneccl.transport import OneCclTransport
from baton_serve.kvtransfer.transports.port import NodeFacts, Transport
from baton_serve.kvtransfer.transports.usm import UsmTransport
from baton_serve.kvtransfer.transports.zeromq import ZeromqTransport


def build(facts: NodeFacts, settings: TransferSettings, in_process: InProcess | None) -> dict[str, Transport]:
    """Create the transports that a node may use by its settings, by name, in order of preference. `facts` describes the
    node. `memory` is left out if `in_process` is None.
    """
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
                # The type of the setting allows only known names: this is a name that step 3 has and step 2 lacks.
                raise ValueError(f"no transport is named {name!r}")
    return made

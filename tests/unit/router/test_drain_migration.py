"""The choice of the instance that takes over the blocks of a draining one."""

import msgspec

from baton_serve.contracts.identity import BlockHash, Generation, InstanceId
from baton_serve.contracts.instance import Load, Role
from baton_serve.contracts.messages import HotBlocks
from baton_serve.services.router.cluster.drain_migration import pick_target
from baton_serve.services.router.cluster.worker_state import WorkerState
from tests.unit.router.fakes import record

HOT = HotBlocks(
    instance=InstanceId("prefill-0"),
    generation=Generation(1),
    names=[BlockHash(bytes([n]) * 16) for n in range(8)],
    timeout_s=5.0,
)


def worker(name: str, role: Role, *, free_blocks: int = 100) -> WorkerState:
    load = Load(free_blocks=free_blocks, total_blocks=100, prefill_tokens_per_s=1000.0)
    return WorkerState(record(name, role, load=load), state="ready")


LEAVING = worker("prefill-0", "prefill")


def test_the_roomiest_instance_of_the_pool_inherits_all() -> None:
    heirs = [worker("prefill-1", "prefill", free_blocks=50), worker("prefill-2", "prefill"), worker("d", "decode")]
    found = pick_target(LEAVING, HOT, [LEAVING, *heirs])
    assert found is not None
    heir, adopt = found
    assert heir.record.instance == "prefill-2"
    assert (adopt.names, adopt.ticket.source, adopt.ticket.sink) == (HOT.names, "prefill-0", "prefill-2")


def test_an_heir_with_little_room_takes_the_hottest() -> None:
    found = pick_target(LEAVING, HOT, [worker("prefill-1", "prefill", free_blocks=6)])
    assert found is not None and found[1].names == HOT.names[:3]


def test_there_may_be_nobody() -> None:
    draining = worker("prefill-1", "prefill")
    draining.draining = True
    other = worker("prefill-2", "prefill")
    layout = msgspec.structs.replace(other.record.layout, block_tokens=128)
    other.record = msgspec.structs.replace(other.record, layout=layout)
    assert pick_target(LEAVING, HOT, [LEAVING, draining, other, worker("d", "decode")]) is None

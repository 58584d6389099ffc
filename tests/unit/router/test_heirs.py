"""Who takes over the blocks of an instance that leaves."""

import msgspec

from baton_serve.contracts.identity import BlockName, Generation, InstanceId
from baton_serve.contracts.instance import Load, Role
from baton_serve.contracts.messages import HotBlocks
from baton_serve.services.router.cluster.drain_migration import bequeath
from baton_serve.services.router.cluster.worker_state import Member
from tests.unit.router.fakes import record

HOT = HotBlocks(
    instance=InstanceId("prefill-0"),
    generation=Generation(1),
    names=[BlockName(bytes([n]) * 16) for n in range(8)],
    timeout_s=5.0,
)


def member(name: str, role: Role, *, free_blocks: int = 100) -> Member:
    load = Load(free_blocks=free_blocks, total_blocks=100, prefill_tokens_per_s=1000.0)
    return Member(record(name, role, load=load), state="ready")


LEAVING = member("prefill-0", "prefill")


def test_the_roomiest_instance_of_the_pool_inherits_all() -> None:
    heirs = [member("prefill-1", "prefill", free_blocks=50), member("prefill-2", "prefill"), member("d", "decode")]
    found = bequeath(LEAVING, HOT, [LEAVING, *heirs])
    assert found is not None
    heir, adopt = found
    assert heir.record.instance == "prefill-2"
    assert (adopt.names, adopt.ticket.source, adopt.ticket.sink) == (HOT.names, "prefill-0", "prefill-2")


def test_an_heir_with_little_room_takes_the_hottest() -> None:
    found = bequeath(LEAVING, HOT, [member("prefill-1", "prefill", free_blocks=6)])
    assert found is not None and found[1].names == HOT.names[:3]


def test_there_may_be_nobody() -> None:
    draining = member("prefill-1", "prefill")
    draining.draining = True
    other = member("prefill-2", "prefill")
    layout = msgspec.structs.replace(other.record.layout, block_tokens=128)
    other.record = msgspec.structs.replace(other.record, layout=layout)
    assert bequeath(LEAVING, HOT, [LEAVING, draining, other, member("d", "decode")]) is None

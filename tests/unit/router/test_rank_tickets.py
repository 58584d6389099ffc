"""Tickets name the ranks of the source if they divide blocks as those of the sink do."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from baton_serve.contracts.identity import RequestId
from baton_serve.contracts.instance import InstanceRecord, RankTransfers
from baton_serve.contracts.messages import Ticket
from baton_serve.services.router.requests.attempt import _ticket
from tests.unit.router.fakes import record

HALVES = RankTransfers("halves", ["tcp://a:1", "tcp://a:2"])


class OlderRecord(msgspec.Struct):
    """The record of an instance of a version before ranks sent anything themselves."""

    instance: str


class OlderTicket(msgspec.Struct):
    """A ticket as such an instance reads it."""

    ticket: str


def ticket(source: RankTransfers | None, sink: RankTransfers | None) -> Ticket:
    ends: list[Any] = [
        SimpleNamespace(record=msgspec.structs.replace(record(name, "prefill"), rank_transfers=ranks))
        for name, ranks in (("a", source), ("b", sink))
    ]
    unused: Any = None
    return _ticket(RequestId("r"), ends[0], ends[1], unused, timeout_s=1.0)


@pytest.mark.parametrize(
    ("source", "sink", "named"),
    [
        (HALVES, RankTransfers("halves", ["tcp://b:1", "tcp://b:2"]), HALVES.addresses),
        (HALVES, RankTransfers("stages", ["tcp://b:1", "tcp://b:2"]), []),
        (HALVES, None, []),
        (None, HALVES, []),
        (None, None, []),
    ],
)
def test_ranks_are_named_only_if_both_ends_divide_blocks_equally(
    source: RankTransfers | None, sink: RankTransfers | None, named: list[str]
) -> None:
    assert ticket(source, sink).source_ranks == named


def test_instances_and_routers_of_other_versions_read_each_others_messages() -> None:
    new = msgspec.msgpack.encode(msgspec.structs.replace(record("a", "prefill"), rank_transfers=HALVES))
    assert msgspec.msgpack.decode(new, type=OlderRecord).instance == "a"
    old = msgspec.to_builtins(record("a", "prefill"))
    del old["rank_transfers"]
    assert msgspec.convert(old, InstanceRecord).rank_transfers is None
    made = ticket(HALVES, HALVES)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=OlderTicket).ticket == made.ticket
    older = msgspec.to_builtins(made)
    del older["source_ranks"]
    assert msgspec.convert(older, Ticket).source_ranks == []

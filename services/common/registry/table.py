"""The rules of a registry over a plain table: no I/O, no clock (`now` is passed in)."""

from dataclasses import dataclass, field

from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.contracts.instance import InstanceRecord
from baton_serve.services.common.registry.port import without_load

GENERATIONS_KEPT = 64
"""How many generations of one instance are remembered, so that an old one is known as such."""


@dataclass(slots=True)
class _Row:
    generations: list[Generation] = field(default_factory=list)
    """In the order of their first registration; the last one is the only one that may speak."""
    has_left: bool = False
    record: InstanceRecord | None = None
    expires: float = 0.0


class RecordTable:
    """Live records by instance."""

    def __init__(self) -> None:
        self._rows: dict[InstanceId, _Row] = {}

    def register(self, record: InstanceRecord, ttl_s: float, now: float) -> tuple[Generation, bool]:
        """Which generation is in force now, and whether the table changed other than in load."""
        row = self._rows.setdefault(record.instance, _Row())
        if record.generation not in row.generations:
            row.generations = [*row.generations[1 - GENERATIONS_KEPT :], record.generation]
            row.has_left = False
        elif record.generation != row.generations[-1]:
            return row.generations[-1], False
        elif row.has_left:
            return Generation(0), False
        is_news = row.record is None or without_load(row.record) != without_load(record)
        row.record, row.expires = record, now + ttl_s
        return record.generation, is_news

    def leave(self, instance: InstanceId, generation: Generation) -> bool:
        """Whether a record was removed. Of an unknown generation nothing is remembered."""
        row = self._rows.get(instance)
        if row is None or not row.generations or row.generations[-1] != generation:
            return False
        was_there = row.record is not None
        row.record, row.has_left = None, True
        return was_there

    def expire(self, now: float) -> bool:
        """Whether any record's time was up."""
        due = [row for row in self._rows.values() if row.record is not None and row.expires <= now]
        for row in due:
            row.record = None
        return bool(due)

    def records(self) -> list[InstanceRecord]:
        live = [row.record for row in self._rows.values() if row.record is not None]
        return sorted(live, key=lambda record: record.instance)

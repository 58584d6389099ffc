"""Decides which records of a registry are valid: TTL, generation, renewal. It is pure: no I/O and no clock (`now` is
passed in).
"""

from dataclasses import dataclass, field

from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.contracts.instance import InstanceRecord
from baton_serve.services.common.registry.port import without_load

GENERATIONS_KEPT = 64
"""Number of generations of one instance that are remembered. One that is forgotten would be taken for a new one."""


@dataclass(slots=True)
class _Row:
    """The registry's entry for one instance. It stays after the instance has left, so that an old generation is
    recognized.
    """

    generations: list[Generation] = field(default_factory=list)
    """Generations in the order of their first registration. Only the last one may renew or leave."""
    has_left: bool = False
    record: InstanceRecord | None = None
    expires: float = 0.0


class RecordTable:
    """Holds the records of all registered instances in memory. The registry in a router uses it."""

    def __init__(self) -> None:
        self._rows: dict[InstanceId, _Row] = {}

    def register(self, record: InstanceRecord, ttl_s: float, now: float) -> tuple[Generation, bool]:
        """Add or renew a record for `ttl_s` seconds from `now` on, unless a newer generation of the instance is
        registered. Return two values: the generation that is valid now, and whether any field except the load has
        changed. If the record was rejected, that is another generation than the record's, or 0 if the record's process
        has left before.
        """
        row = self._rows.setdefault(record.instance, _Row())
        if record.generation not in row.generations:
            row.generations = [*row.generations[1 - GENERATIONS_KEPT :], record.generation]
            row.has_left = False
        elif record.generation != row.generations[-1]:
            return row.generations[-1], False
        elif row.has_left:
            return Generation(0), False
        is_change = row.record is None or without_load(row.record) != without_load(record)
        row.record, row.expires = record, now + ttl_s
        return record.generation, is_change

    def leave(self, instance: InstanceId, generation: Generation) -> bool:
        """Remove the record of this generation of an instance and return whether there was one. Do nothing if another
        generation is registered.
        """
        row = self._rows.get(instance)
        if row is None or not row.generations or row.generations[-1] != generation:
            return False
        was_there = row.record is not None
        row.record, row.has_left = None, True
        return was_there

    def expire(self, now: float) -> bool:
        """Remove the records whose time has ended at `now` without a renewal. Return whether any was removed."""
        due = [row for row in self._rows.values() if row.record is not None and row.expires <= now]
        for row in due:
            row.record = None
        return bool(due)

    def records(self) -> list[InstanceRecord]:
        """Return the records of all instances that have neither left nor expired, ordered by instance."""
        live = [row.record for row in self._rows.values() if row.record is not None]
        return sorted(live, key=lambda record: record.instance)

"""Recurrent states in name only: a state is the list of the tokens that it has seen."""

from collections.abc import Sequence
from typing import NamedTuple

from baton_serve.contracts.identity import BlockHash
from baton_serve.engine.core.request_table import RequestTable
from baton_serve.engine.core.scheduler import ScheduledBatch
from baton_serve.engine.core.sequence import Request

State = tuple[int, ...]


class Part(NamedTuple):
    """One block of a checkpoint."""

    state: State
    number: int


class FakeStates:
    """The states of all batch slots, and the checkpoints in blocks and in slots of the host tier."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._slots: dict[int, State] = {}
        self._blocks: dict[int, Part | None] = {}
        self._host: dict[int, Part | None] = {}

    def copy(self) -> None:
        """Execute what was planned: first the copies of the host tier, as the engine does."""
        if self._table.pool.host is not None:
            for block, slot, is_to_host in self._table.pool.host.take_tier_copies():
                if is_to_host:
                    self._host[slot] = self._blocks.get(block)
                else:
                    self._blocks[block] = self._host.get(slot)
        for copy in self._table.checkpoints.take_copies():
            match copy.kind:
                case "clear":
                    self._slots[copy.slot] = ()
                case "save":
                    for number, block in enumerate(copy.blocks):
                        self._blocks[block] = Part(self._slots[copy.slot], number)
                case "restore":
                    state = self._blocks[copy.blocks[0]]
                    assert state is not None, "blocks of KV were taken for a checkpoint"
                    self.check_blocks(copy.blocks, state.state)
                    self._slots[copy.slot] = state.state
                case "copy":
                    self._slots[copy.slot] = self._slots[copy.source]

    def compute(self, plan: ScheduledBatch) -> None:
        """Check that each chunk continues from its states, and move them on. KV overwrites what its blocks had."""
        rows = {chunk.sequence.slot for chunk in plan.chunks}
        for chunk in plan.chunks:
            sequence = chunk.sequence
            before = tuple(sequence.token_ids[: chunk.start])
            assert self._slots[sequence.slot] == before, "a chunk starts from the states of other tokens"
            self._slots[sequence.slot] = tuple(sequence.token_ids[: chunk.start + chunk.length])
            if chunk.inner:
                assert chunk.inner < chunk.length and chunk.inner_row not in rows, "one row for two checkpoints"
                rows.add(chunk.inner_row)
                self._slots[chunk.inner_row] = tuple(sequence.token_ids[: chunk.start + chunk.inner])
            for block in sequence.blocks:
                self._blocks[block] = None

    def receive(self, request: Request, names: set[BlockHash]) -> None:
        """Fill the reserved blocks of these hashes as the prefill instance has computed them."""
        (parent,) = request.sequences
        for name, block in request.missing.items():
            if name in names:
                is_state = block in parent.checkpoint_blocks
                number = parent.checkpoint_blocks.index(block) if is_state else 0
                self._blocks[block] = Part(tuple(parent.token_ids), number) if is_state else None

    def fill(self, block: int, part: Part | None) -> None:
        """Fill a block as a transport does: with one block of a checkpoint, or with KV."""
        self._blocks[block] = part

    def check_blocks(self, blocks: Sequence[int], tokens: Sequence[int]) -> None:
        """Assert that these blocks are the checkpoint after these tokens."""
        assert [self._blocks[block] for block in blocks] == [Part(tuple(tokens), n) for n in range(len(blocks))]

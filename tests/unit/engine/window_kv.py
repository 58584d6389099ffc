"""KV in name only, in cache groups: the KV of a token is its group and the tokens up to it."""

from collections.abc import Sequence
from typing import NamedTuple

from baton_serve.contracts.block_hash import hash_blocks, window_hashes
from baton_serve.contracts.identity import BlockHash
from baton_serve.engine.core.request_table import RequestTable
from baton_serve.engine.core.scheduler import ScheduledBatch
from baton_serve.engine.core.sequence import Sequence as EngineSequence
from tests.unit.engine.work import BLOCK_TOKENS, ROOT, made_up_token


class TokenKV(NamedTuple):
    """The KV of the last of these tokens, in one cache group."""

    group: int
    tokens: tuple[int, ...]


class FakeKV:
    """The KV in all blocks of the device and of the host tier."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._blocks: dict[int, dict[int, TokenKV]] = {}
        self._host: dict[int, dict[int, TokenKV]] = {}

    def copy_tiers(self) -> None:
        """Execute the planned copies of the host tier."""
        if self._table.pool.host is not None:
            for block, slot, is_to_host in self._table.pool.host.take_tier_copies():
                source, target = (self._blocks, self._host) if is_to_host else (self._host, self._blocks)
                a, b = (block, slot) if is_to_host else (slot, block)
                target[b] = dict(source.get(a, {}))

    def copy_forks(self) -> None:
        for source, target in self._table.take_copies():
            self._blocks[target] = dict(self._blocks.get(source, {}))

    def compute(self, plan: ScheduledBatch) -> None:
        """Store the KV of new tokens in all groups. Check that each token finds the KV of all tokens that it sees."""
        window, groups = self._table.limits.window_tokens, range(self._table.limits.num_window_groups)
        for chunk in plan.chunks:
            sequence, tokens = chunk.sequence, tokens_of(chunk.sequence)
            for at in range(chunk.start, chunk.start + chunk.length):
                self._store(sequence.blocks[at // BLOCK_TOKENS], 0, tokens[: at + 1])
                for group in groups:
                    self._store(sequence.window_blocks[at // BLOCK_TOKENS][group], 1 + group, tokens[: at + 1])
        for chunk in plan.chunks:
            sequence, tokens = chunk.sequence, tokens_of(chunk.sequence)
            for seen in range(chunk.start + chunk.length):
                self._check(sequence.blocks[seen // BLOCK_TOKENS], 0, tokens[: seen + 1])
            for seen in range(max(0, chunk.start - window + 1), chunk.start + chunk.length):
                for group in groups:
                    self._check(sequence.window_blocks[seen // BLOCK_TOKENS][group], 1 + group, tokens[: seen + 1])

    def fill(self, tokens: Sequence[int], blocks: dict[BlockHash, int]) -> None:
        """Fill the blocks of these hashes, of a prompt, as another instance has computed them."""
        names = hash_blocks(ROOT, tokens, BLOCK_TOKENS)
        for index, name in enumerate(names):
            for group, one in enumerate([name, *window_hashes(name, self._table.limits.num_window_groups)]):
                for at in range(index * BLOCK_TOKENS, min(len(tokens), (index + 1) * BLOCK_TOKENS)):
                    if one in blocks:
                        self._store(blocks[one], group, tuple(tokens[: at + 1]))

    def check_named(self, tokens: Sequence[int], blocks: dict[BlockHash, int]) -> None:
        """Check that the blocks hold the KV of a prompt that their hashes name."""
        names = hash_blocks(ROOT, tokens, BLOCK_TOKENS)
        for at in range(len(tokens)):
            name = names[at // BLOCK_TOKENS]
            for group, one in enumerate([name, *window_hashes(name, self._table.limits.num_window_groups)]):
                if one in blocks:
                    self._check(blocks[one], group, tuple(tokens[: at + 1]))

    def _store(self, block: int, group: int, tokens: tuple[int, ...]) -> None:
        assert block, "block 0 is padding"
        self._blocks.setdefault(block, {})[(len(tokens) - 1) % BLOCK_TOKENS] = TokenKV(group, tokens)

    def _check(self, block: int, group: int, tokens: tuple[int, ...]) -> None:
        found = self._blocks.get(block, {}).get((len(tokens) - 1) % BLOCK_TOKENS)
        assert found == TokenKV(group, tokens), "a token sees other KV than its own sequence's"


def tokens_of(sequence: EngineSequence) -> tuple[int, ...]:
    """Return the tokens of a sequence, also the ones that are being computed."""
    request_id, known = sequence.request.work.request_id, sequence.num_generated
    coming = range(known, known + sequence.num_output_placeholders)
    return (*sequence.token_ids, *(made_up_token(request_id, sequence.index, position) for position in coming))

"""Chunked attention: which cache positions each new token sees."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from baton_serve.engine.kernels import AttentionMetadata
from baton_serve.engine.model.batch_inputs import StepInputs
from baton_serve.engine.model.chunked_attention import chunked_batch

BLOCK_TOKENS, NUM_BLOCKS = 4, 16
chunks = st.sampled_from([4, 8, 12, 20])
parts = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 24)), min_size=1, max_size=5)


def seen(meta: AttentionMetadata) -> list[list[int]]:
    """The places in the cache that each new token sees, in order."""
    found = []
    starts = meta.query_starts.tolist()
    for row, context in enumerate(meta.context_lens.tolist()):
        length = starts[row + 1] - starts[row]
        places = [
            int(meta.block_tables[row, at // BLOCK_TOKENS]) * BLOCK_TOKENS + at % BLOCK_TOKENS for at in range(context)
        ]
        found += [places[: context - length + number + 1] for number in range(length)]
    return found


@given(chunk=chunks, sequences=parts)
def test_a_token_sees_its_own_chunk_up_to_itself(chunk: int, sequences: list[tuple[int, int]]) -> None:
    ends = [start + length for start, length in sequences]
    lengths = [length for _, length in sequences]
    meta = AttentionMetadata(
        query_starts=torch.tensor([0, *lengths]).cumsum(0).int(),
        context_lens=torch.tensor(ends).int(),
        block_tables=(torch.arange(len(ends) * NUM_BLOCKS) + 1).view(len(ends), NUM_BLOCKS).int(),
        slots=torch.zeros(sum(lengths), dtype=torch.int64),
        max_query_len=max(lengths),
        max_context_len=max(ends),
    )
    tokens = torch.zeros(sum(lengths), dtype=torch.int64)
    made = chunked_batch(StepInputs(tokens, tokens, None, meta), chunk, BLOCK_TOKENS)
    positions = [at for start, length in sequences for at in range(start, start + length)]
    for whole, own, position in zip(seen(meta), seen(made), positions, strict=True):
        assert own == whole[position // chunk * chunk :]
    assert made.max_context_len <= chunk
    assert made.max_query_len == int(made.query_starts.diff().max())

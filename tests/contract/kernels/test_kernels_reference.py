"""The plain-torch twin against the definition, one query, one head, one key at a time."""

import torch
from torch import Tensor
from torch.nn import functional

from baton_serve.engine.kernels.bidirectional import BidirectionalPrompts
from baton_serve.engine.kernels.interfaces import AttentionMetadata, AttentionSpec
from baton_serve.engine.kernels.library_kernels import LibraryAttention
from baton_serve.engine.kernels.reference.attention import ReferenceAttention

HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 4, 2, 8, 3


def by_definition(query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
    output = torch.zeros_like(query)
    for i in range(query.shape[0]):
        position = keys.shape[0] - query.shape[0] + i
        first = 0 if spec.sliding_window is None else max(0, position - spec.sliding_window + 1)
        for head in range(HEADS):
            seen = slice(first, position + 1)
            scores = keys[seen, head // 2] @ query[i, head] * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            weights = scores.exp()
            total = weights.sum() + (0.0 if spec.sinks is None else spec.sinks[head].exp())
            output[i, head] = weights / total @ values[seen, head // 2]
    return output


def check(sequences: list[tuple[int, int]], spec: AttentionSpec) -> None:
    torch.manual_seed(0)
    cache = torch.zeros(32, 2, KV_HEADS, BLOCK_TOKENS, HEAD_DIM)
    tables = torch.randperm(32)[: 6 * len(sequences)].view(len(sequences), 6).int()
    new = [n for n, _ in sequences]
    query = torch.randn(sum(new), HEADS, HEAD_DIM)
    starts = torch.tensor([0, *new]).cumsum(0).int()
    lens = [n + context for n, context in sequences]
    meta = AttentionMetadata(
        starts, torch.tensor(lens).int(), tables, torch.empty(0, dtype=torch.int64), max(new), max(lens)
    )
    expected = []
    for s, length in enumerate(lens):
        keys, values = torch.randn(2, length, KV_HEADS, HEAD_DIM).unbind(0)
        positions = torch.arange(length)
        slots = tables[s, positions // BLOCK_TOKENS].long() * BLOCK_TOKENS + positions % BLOCK_TOKENS
        where = AttentionMetadata(starts, meta.context_lens, tables, slots, 0, 0)
        ReferenceAttention().store(keys, values, cache, where)
        expected.append(by_definition(query[starts[s] : starts[s + 1]], keys, values, spec))
    result = ReferenceAttention().attend(query, cache, meta, spec)
    torch.testing.assert_close(result, torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_prompts_that_see_themselves_beyond_the_window() -> None:
    """A prompt of 9 tokens whose last 5 are new, with 2 generated tokens behind it, beside a token of an answer."""
    torch.manual_seed(0)
    cache, tables = torch.zeros(16, 2, KV_HEADS, BLOCK_TOKENS, HEAD_DIM), torch.arange(16).view(2, 8).int()
    keys, values = torch.randn(2, 11, KV_HEADS, HEAD_DIM).unbind(0)
    query = torch.randn(8, HEADS, HEAD_DIM)
    lens = torch.tensor([11, 11]).int()
    for table in tables:
        positions = torch.arange(11)
        slots = table[positions // BLOCK_TOKENS].long() * BLOCK_TOKENS + positions % BLOCK_TOKENS
        stored = AttentionMetadata(lens, lens, tables, slots, 0, 0)
        ReferenceAttention().store(keys, values, cache, stored)
    meta = AttentionMetadata(
        torch.tensor([0, 7, 8]).int(),
        lens,
        tables,
        torch.empty(0, dtype=torch.int64),
        7,
        11,
        seen_ends=torch.tensor([9] * 5 + [10, 11, 11]).int(),
        unwindowed=torch.tensor([True] * 5 + [False] * 3),
    )
    for backend in (ReferenceAttention(), LibraryAttention()):
        for window in (None, 3):
            first = [0] * 8 if window is None else [0] * 5 + [7, 8, 8]
            visible = torch.zeros(8, 11, dtype=torch.bool)
            for row, end in enumerate([9] * 5 + [10, 11, 11]):
                visible[row, first[row] : end] = True
            expected = functional.scaled_dot_product_attention(
                query.transpose(0, 1),
                keys.transpose(0, 1).repeat_interleave(2, 0),
                values.transpose(0, 1).repeat_interleave(2, 0),
                attn_mask=visible,
                scale=0.3,
            ).transpose(0, 1)
            found = BidirectionalPrompts(backend).attend(query, cache, meta, AttentionSpec(0.3, sliding_window=window))
            torch.testing.assert_close(found, expected)


def test_a_batch_of_prompts_chunks_and_decode_tokens() -> None:
    check([(1, 9), (5, 0), (0, 4), (4, 7), (1, 0)], AttentionSpec(0.3))


def test_a_batch_of_decode_tokens_alone() -> None:
    check([(1, 9), (1, 0), (1, 14)], AttentionSpec(0.3))


def test_sliding_window_softcap_and_sinks() -> None:
    everything = AttentionSpec(0.9, sliding_window=4, softcap=2.0, sinks=torch.randn(HEADS))
    check([(1, 9), (6, 8)], everything)
    check([(1, 9), (1, 1)], everything)

"""The plain-torch twin against the definition, one query, one head, one key at a time."""

import torch
from torch import Tensor

from baton_serve.engine.kernels.metadata import AttentionMetadata, AttentionSpec
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


def test_a_batch_of_prompts_chunks_and_decode_tokens() -> None:
    check([(1, 9), (5, 0), (0, 4), (4, 7), (1, 0)], AttentionSpec(0.3))


def test_a_batch_of_decode_tokens_alone() -> None:
    check([(1, 9), (1, 0), (1, 14)], AttentionSpec(0.3))


def test_sliding_window_softcap_and_sinks() -> None:
    everything = AttentionSpec(0.9, sliding_window=4, softcap=2.0, sinks=torch.randn(HEADS))
    check([(1, 9), (6, 8)], everything)
    check([(1, 9), (1, 1)], everything)

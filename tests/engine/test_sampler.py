from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton_serve.contracts.identity import BlockHash, RequestId
from baton_serve.contracts.messages import Work
from baton_serve.contracts.sampling import SamplingSpec
from baton_serve.engine.core.scheduler import SampleRow
from baton_serve.engine.core.sequence import Request, Sequence
from baton_serve.engine.sample.constraints import BadWords, ConstraintBuilder
from baton_serve.engine.sample.grammar import Grammars
from baton_serve.engine.sample.sampler import Sampler, apply_top_k_top_p, invert_cumulative
from baton_serve.engine.sample.token_masks import TokenMasker

VOCAB = 40


def make_row(prompt: list[int], output: list[int] | None = None, *, index: int = 0, **sampling: Any) -> SampleRow:
    values: dict[str, Any] = {"seed": 3, "max_tokens": 99, **sampling}
    work = Work(
        request_id=RequestId("r"),
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=SamplingSpec(**values),
        root=BlockHash(b""),
    )
    stops = frozenset(work.sampling.stop_token_ids)
    request = Request(work, "generate", 0, 0, 0.0, stops, stops, 999)
    return SampleRow(0, Sequence(request, index, prompt + (output or [])), index)


def sample(logits: torch.Tensor, *rows: SampleRow) -> list[int]:
    device = torch.device("cpu")
    grammars = Grammars(Path("nowhere"), vocab_size=VOCAB, eos_token_ids=frozenset())
    masking = TokenMasker(ConstraintBuilder(grammars, vocab_size=VOCAB), device)
    constraints = masking.begin(rows)
    masks = None if constraints is None else masking.send(constraints.result())
    masking.close()
    return Sampler(device).sample(logits, rows, masks=masks).token_ids


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)) * 2


def kept_by_sorting(scores: torch.Tensor, top_k: int, top_p: float) -> set[int]:
    """The definition, one row at a time."""
    order = scores.argsort(descending=True).tolist()[:top_k]
    probabilities = scores[order].softmax(-1).tolist()
    kept, total = set(), 0.0
    for token, probability in zip(order, probabilities, strict=True):
        if total >= top_p:
            break
        kept.add(token)
        total += probability
    return kept


@pytest.mark.parametrize("num_candidates", [4, VOCAB])
def test_top_k_and_top_p_keep_what_their_definition_says(num_candidates: int) -> None:
    scores = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0))
    top_k, top_p = [VOCAB, 1, 7, 30, VOCAB, 3], [0.5, 1.0, 0.9, 0.8, 0.01, 0.6]
    kept = apply_top_k_top_p(
        scores, torch.tensor(top_k)[:, None], torch.tensor(top_p)[:, None], num_candidates=num_candidates
    )
    for row in range(len(top_k)):
        found = set(kept[row].isfinite().nonzero()[:, 0].tolist())
        assert found == kept_by_sorting(scores[row], top_k[row], top_p[row])


def test_the_inverse_walks_the_vocabulary_in_order() -> None:
    scores = torch.tensor([[0.25, 0.0, 0.5, 0.25]]).log()
    points = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-32], dtype=torch.float64)
    assert invert_cumulative(scores.expand(6, 4), points).tolist() == [0, 0, 2, 2, 3, 3]


def test_greedy_takes_the_largest(logits: torch.Tensor) -> None:
    assert sample(logits, make_row([1], temperature=0.0)) == [int(logits.argmax())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_first_of_equals(dtype: torch.dtype) -> None:
    rows = torch.randn(5, VOCAB).round().to(dtype)  # whole numbers, of which several are equal
    rows[3] = float("-inf")
    rows[4, [9, 30]] = float("inf")
    expected = rows.max(dim=-1).indices.tolist()
    assert sample(rows, *(make_row([1], temperature=0.0) for _ in rows)) == expected
    assert expected[3:] == [0, 9]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {}])
def test_a_row_that_is_no_numbers_has_no_token(logits: torch.Tensor, sampling: dict[str, Any]) -> None:
    broken = logits.repeat(2, 1)
    broken[0, 7] = float("nan")
    bad, good = (make_row([1], **{"temperature": 1.0, **sampling}) for _ in range(2))
    assert sample(broken, bad, good) == [VOCAB, *sample(logits, good)]
    answer = Sampler(torch.device("cpu")).sample(broken[:1], [make_row([1], logprobs=2, **sampling)])
    assert answer.token_ids == [VOCAB]


def test_a_token_does_not_depend_on_its_neighbours(logits: torch.Tensor) -> None:
    row = make_row([1], [2, 3], temperature=0.8, top_p=0.9)
    others = [make_row([5], temperature=1.3, top_k=3), make_row([6], temperature=0.0), make_row([7], min_p=0.1)]
    alone = sample(logits, row)
    together = sample(logits.expand(4, VOCAB), *others[:2], row, others[2])
    assert together[2] == alone[0]


def test_sequences_of_one_request_draw_differently(logits: torch.Tensor) -> None:
    flat = torch.zeros_like(logits)
    drawn = {sample(flat, make_row([1], index=index))[0] for index in range(20)}
    assert len(drawn) > 8


def test_draws_follow_the_distribution(logits: torch.Tensor) -> None:
    rows = [make_row([1], [0] * n) for n in range(4000)]
    drawn = torch.tensor(sample(logits.expand(4000, VOCAB), *rows)).bincount(minlength=VOCAB) / 4000
    assert (drawn - logits.softmax(-1)[0]).abs().max() < 0.03


def test_min_p_drops_the_unlikely(logits: torch.Tensor) -> None:
    probabilities = logits.softmax(-1)[0]
    allowed = set((probabilities >= 0.3 * probabilities.max()).nonzero()[:, 0].tolist())
    rows = [make_row([1], [0] * n, min_p=0.3) for n in range(200)]
    assert set(sample(logits.expand(200, VOCAB), *rows)) == allowed


def test_repetition_looks_at_the_prompt_and_the_other_penalties_do_not(logits: torch.Tensor) -> None:
    logits = logits.abs() + 0.1
    best, second = logits[0].topk(2).indices.tolist()
    assert sample(logits, make_row([best], temperature=0.0, repetition_penalty=1e6)) == [second]
    assert sample(logits, make_row([best], temperature=0.0, presence_penalty=2.0)) == [best]
    logits[0, best] = logits[0, second] + 1.0
    assert sample(logits, make_row([1], [best], temperature=0.0, presence_penalty=2.0)) == [second]


def test_frequency_counts_each_time(logits: torch.Tensor) -> None:
    logits = torch.zeros_like(logits)
    logits[0, 4], logits[0, 9] = 5.0, 3.0
    assert sample(logits, make_row([1], [4], temperature=0.0, frequency_penalty=1.5)) == [4]
    assert sample(logits, make_row([1], [4, 4], temperature=0.0, frequency_penalty=1.5)) == [9]


def test_penalties_follow_a_growing_sequence(logits: torch.Tensor) -> None:
    sampler = Sampler(torch.device("cpu"))
    row = make_row([1], temperature=0.0, presence_penalty=2.0)
    flat = torch.arange(VOCAB, 0, -1.0)[None] * 0.1
    for expected in range(5):
        (token,) = sampler.sample(flat, [row]).token_ids
        assert token == expected
        row.sequence.token_ids.append(token)


def test_a_negative_logit_is_pushed_down_by_repetition() -> None:
    logits = torch.tensor([[-1.0, -1.5]])
    assert sample(logits, make_row([0], temperature=0.0, repetition_penalty=2.0)) == [1]


def test_logit_bias_and_allowed_tokens(logits: torch.Tensor) -> None:
    assert sample(logits, make_row([1], temperature=0.0, logit_bias={7: 100.0})) == [7]
    assert sample(logits, make_row([1], temperature=0.0, allowed_token_ids=[3])) == [3]
    assert set(
        sample(logits.expand(50, VOCAB), *[make_row([1], [0] * n, allowed_token_ids=[3, 5]) for n in range(50)])
    ) <= {3, 5}


def test_stop_tokens_wait_for_min_tokens(logits: torch.Tensor) -> None:
    best = int(logits.argmax())
    rules: dict[str, Any] = {"temperature": 0.0, "stop_token_ids": [best], "min_tokens": 2}
    assert sample(logits, make_row([1], [0], **rules)) != [best]
    assert sample(logits, make_row([1], [0, 0], **rules)) == [best]


def test_stop_tokens_do_not_wait_when_nothing_else_is_allowed(logits: torch.Tensor) -> None:
    assert sample(logits, make_row([1], temperature=0.0, allowed_token_ids=[3], stop_token_ids=[3], min_tokens=2)) == [
        3
    ]


def test_only_rows_with_rules_are_masked(logits: torch.Tensor) -> None:
    best = int(logits.argmax())
    free, bound = make_row([1], temperature=0.0), make_row([1], temperature=0.0, allowed_token_ids=[3])
    assert sample(logits.expand(3, VOCAB), bound, free, bound) == [3, best, 3]


def test_a_bad_word_is_never_completed(logits: torch.Tensor) -> None:
    best, second = logits[0].topk(2).indices.tolist()
    words: dict[str, Any] = {"temperature": 0.0, "bad_words": [[5, best], [second]]}
    assert sample(logits, make_row([5], **words)) == [best], "the prompt does not count"
    assert sample(logits, make_row([1], [7, 5], **words)) not in ([best], [second])


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=8), st.lists(st.integers(0, 2), max_size=6)
)
def test_bad_words_are_found_by_their_beginnings(words: list[list[int]], generated: list[int]) -> None:
    expected = [word[-1] for word in words if [*generated, word[-1]][-len(word) :] == word]
    assert sorted(BadWords(words).banned(generated)) == sorted(expected)


def test_many_long_bad_words_are_compared_once_per_length() -> None:
    class Counted(list[int]):
        num_reads = 0

        def __getitem__(self, key: Any) -> Any:
            self.num_reads += 1
            return super().__getitem__(key)

    generated = Counted([5] * 300)
    words = BadWords([[5] * 254 + [last] for last in range(1000)] + [[first] + [5] * 254 for first in range(1000)])
    assert len(words.banned(generated)) == 1001
    assert generated.num_reads == 1


def test_logprobs_are_of_the_raw_logits_with_ranks(logits: torch.Tensor) -> None:
    row = make_row([1], temperature=0.5, logit_bias={7: 100.0}, logprobs=2)
    plain = make_row([1], temperature=0.0)
    answer = Sampler(torch.device("cpu")).sample(logits.expand(2, VOCAB), [plain, row])
    assert answer.logprobs is not None
    assert answer.logprobs[0] is None
    found = answer.logprobs[1]
    assert found is not None
    expected = logits[0].log_softmax(-1)
    assert found.chosen.token_id == 7
    assert found.chosen.logprob == pytest.approx(float(expected[7]))
    assert found.chosen.rank == int((expected >= expected[7]).sum())
    assert [(entry.token_id, entry.rank) for entry in found.top] == [
        (token, rank) for rank, token in enumerate(expected.topk(2).indices.tolist(), 1)
    ]


def test_alternatives_may_be_named(logits: torch.Tensor) -> None:
    rows = [make_row([1], temperature=0.0, logprobs=0, logprob_token_ids=[3, 1]), make_row([1], logprobs=1)]
    answer = Sampler(torch.device("cpu")).sample(logits.expand(2, VOCAB), rows)
    assert answer.logprobs is not None
    named, others = answer.logprobs
    expected = logits[0].log_softmax(-1)
    assert named is not None and others is not None
    assert named.chosen.token_id == int(expected.argmax())
    assert [entry.token_id for entry in named.top] == [3, 1]
    for entry in named.top:
        assert entry.logprob == pytest.approx(float(expected[entry.token_id]))
        assert entry.rank == int((expected >= expected[entry.token_id]).sum())
    assert [entry.token_id for entry in others.top] == [int(expected.argmax())]

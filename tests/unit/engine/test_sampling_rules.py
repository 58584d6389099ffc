from typing import Any

import pytest
from msgspec import structs

from baton_serve.contracts.sampling import SamplingSpec
from baton_serve.engine.core.request_table import SchedulerConfig
from baton_serve.engine.core.sampling_rules import check_work, uniform
from baton_serve.engine.errors import RequestError
from tests.unit.engine.work import make_work

LIMITS = SchedulerConfig(block_tokens=4, max_model_len=20, max_num_seqs=4, max_num_batched_tokens=8)


def check(length: int = 3, **sampling: Any) -> None:
    values: dict[str, Any] = {"seed": 0, "max_tokens": 4, **sampling}
    work = structs.replace(make_work("a", [1] * length), sampling=SamplingSpec(**values))
    check_work(work, LIMITS, vocab_size=10, max_logprobs=5)


def test_a_random_number_depends_on_all_of_its_inputs() -> None:
    numbers = {uniform(seed, sequence, position) for seed in range(8) for sequence in range(8) for position in range(8)}
    assert len(numbers) == 512
    assert all(0.0 <= number < 1.0 for number in numbers)


def test_random_numbers_are_the_same_for_ever() -> None:
    assert uniform(1, 2, 3) == 0.814259011298418
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)


def test_random_numbers_are_even() -> None:
    mean = sum(uniform(5, 0, position) for position in range(10_000)) / 10_000
    assert mean == pytest.approx(0.5, abs=0.01)


def test_an_ordinary_request_passes() -> None:
    check(19, temperature=1.0, top_p=0.9, logprobs=5)


def test_too_long_a_prompt_is_reported_with_numbers() -> None:
    with pytest.raises(RequestError, match=r"20 tokens.*maximum is 19") as caught:
        check(20)
    assert caught.value.code == "too_long"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("presence_penalty", 3.0),
        ("repetition_penalty", 0.0),
        ("logprobs", 6),
        ("logprob_token_ids", [1] * 6),
        ("logprob_token_ids", [10]),
        ("min_tokens", 5),
        ("logit_bias", {10: 1.0}),
        ("allowed_token_ids", []),
        ("max_tokens", 0),
    ],
)
def test_what_can_never_be_sampled_is_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        check(**{name: value})
    assert caught.value.code == "invalid"


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        check(0)

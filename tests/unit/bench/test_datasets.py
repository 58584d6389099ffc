"""Data sets and arrival times of `baton-bench serve` and `throughput`."""

import json
import math
import statistics
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from baton_serve.bench.serving.datasets import (
    Arrivals,
    DatasetError,
    RandomLengths,
    TextMeasure,
    custom_dataset,
    random_dataset,
    read_tokenizer,
    sharegpt_dataset,
)

DEMO_MODEL = Path(__file__).resolve().parents[3] / "services" / "local" / "demo_model"


@pytest.fixture(scope="module")
def exact() -> TextMeasure:
    tokenizer = read_tokenizer(str(DEMO_MODEL))
    assert tokenizer is not None
    return TextMeasure(tokenizer)


def test_random_prompts_have_exactly_the_tokens_asked_for(exact: TextMeasure) -> None:
    found = random_dataset(20, RandomLengths(50, 7, prefix_tokens=10), exact, seed=1)
    lengths = [exact.count(str(request.prompt)) for request in found]
    assert statistics.median(lengths) == 60 and max(lengths) - min(lengths) <= 2
    assert {request.max_tokens for request in found} == {7}
    first, second = (exact.tokenizer.encode(str(request.prompt)).ids for request in found[:2])  # type: ignore[union-attr]
    assert first[:8] == second[:8] and first[-20:] != second[-20:]


def test_the_range_ratio_varies_input_and_output(exact: TextMeasure) -> None:
    found = random_dataset(200, RandomLengths(20, 40, range_ratio=0.5), exact, seed=1)
    outputs = {request.max_tokens for request in found}
    assert min(outputs) >= 20 and max(outputs) <= 60 and len(outputs) > 20
    with pytest.raises(DatasetError, match="--random-range-ratio is 1"):
        random_dataset(1, RandomLengths(20, 40, range_ratio=1.0), exact, seed=1)


def test_equal_seeds_give_equal_prompts() -> None:
    def prompts(seed: int) -> list[object]:
        return [request.prompt for request in random_dataset(3, RandomLengths(8, 1), TextMeasure(None), seed)]

    assert prompts(1) == prompts(1) != prompts(2)


def write_sharegpt(path: Path) -> Path:
    turns = [
        ["What is the code of the blue box?", "The code of the blue box is 4812, as the text says."],
        ["Hi", "Hello there, how are you today, my friend?"],
        ["long " * 3000, "This prompt is too long to be used here."],
        ["Only one turn that nobody answered, so it is left out."],
    ]
    entries = [{"conversations": [{"from": "human", "value": text} for text in pair]} for pair in turns]
    path.write_text(json.dumps(entries))
    return path


def test_sharegpt_takes_first_turns_of_usable_length_and_the_length_of_the_answer(
    tmp_path: Path, exact: TextMeasure
) -> None:
    path = write_sharegpt(tmp_path / "share.json")
    found = sharegpt_dataset(path, 3, exact, output_tokens=None, seed=0)
    assert {request.prompt for request in found} == {"What is the code of the blue box?"} and len(found) == 3
    assert found[0].max_tokens == exact.count("The code of the blue box is 4812, as the text says.")
    assert sharegpt_dataset(path, 1, exact, output_tokens=9, seed=0)[0].max_tokens == 9


def test_a_custom_file_gives_prompts_and_may_give_lengths(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "a", "output_tokens": 5}\n\n{"prompt": "b", "output_tokens": 6}\n')
    found = custom_dataset(path, 3, output_tokens=-1, seed=0, shuffle=False)
    assert [(request.prompt, request.max_tokens) for request in found] == [("a", 5), ("b", 6), ("a", 5)]
    assert custom_dataset(path, 1, output_tokens=8, seed=0, shuffle=False)[0].max_tokens == 8


@pytest.mark.parametrize("text", ["", "{", '{"text": "a"}', "[1]", '"a"'])
def test_a_file_of_another_form_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other"
    path.write_text(text)
    with pytest.raises(DatasetError, match=str(path)):
        custom_dataset(path, 1, output_tokens=8, seed=0)
    with pytest.raises(DatasetError, match=str(path)):
        sharegpt_dataset(path, 1, TextMeasure(None), output_tokens=None, seed=0)
    with pytest.raises(DatasetError, match="cannot be read"):
        custom_dataset(tmp_path / "none", 1, output_tokens=8, seed=0)


def test_requests_arrive_at_the_rate_and_burstiness_sets_the_spread_of_gaps() -> None:
    def spread(burstiness: float) -> float:
        times = Arrivals(10.0, burstiness).times(4000, seed=1)
        assert times[0] == 0.0 and times[-1] == pytest.approx(400, rel=0.05)
        gaps = [later - earlier for earlier, later in pairwise(times)]
        return statistics.pstdev(gaps) / statistics.fmean(gaps)

    assert spread(1.0) == pytest.approx(1.0, rel=0.1)
    assert spread(100.0) == pytest.approx(0.1, rel=0.1)
    assert set(Arrivals(math.inf).times(5, seed=1)) == {0.0}


@pytest.mark.parametrize("ramp", ["linear", "exponential"])
def test_a_ramp_raises_the_rate(ramp: str) -> None:
    times = Arrivals(ramp=ramp, start_per_s=1.0, end_per_s=16.0).times(2000, seed=1)
    assert times[200] - times[0] > 3 * (times[1999] - times[1799])


def test_without_a_tokenizer_a_random_prompt_has_a_word_for_each_token() -> None:
    assert len(TextMeasure(None).prompt(Random(1), 12).split()) == 12

"""best_of and beam search of the offline API: beams equal those of transformers, and those of every possible answer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton_serve.engine import LLM, BeamSearchParams, ConfigError, RequestError, SamplingParams
from tests.tiny_models import write_tiny_model

PROMPTS = ["once upon a time", "the baton and the block", "x"]
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("beams") / "llama")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS) as loaded:
        yield loaded


def beams_of(folder: Path, ids: list[int], width: int, max_tokens: int) -> list[list[int]]:
    """By transformers, without ends: all are equally long, and only then do the two rank alike."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    limits = {"max_new_tokens": max_tokens, "num_beams": width, "num_return_sequences": width, "do_sample": False}
    given = torch.tensor([ids])
    found = model.generate(given, attention_mask=torch.ones_like(given), pad_token_id=0, **limits)
    tokens: list[list[int]] = found[:, len(ids) :].tolist()
    return tokens


def test_beams_are_those_of_transformers(llm: LLM, folder: Path) -> None:
    """Several prompts at once, in both ways to ask, beside one that is written without beams."""
    params = SamplingParams(n=3, use_beam_search=True, temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=1)
    greedy = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    alone = llm.generate("x", greedy, use_tqdm=False)[0].outputs
    *outputs, beside = llm.generate([*PROMPTS, "x"], [params] * 3 + [greedy], use_tqdm=False)
    assert beside.outputs == alone
    searched = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True))
    for output, found in zip(outputs, searched, strict=True):
        expected = beams_of(folder, output.prompt_token_ids, 3, 10)
        assert [answer.token_ids for answer in output.outputs] == expected
        assert [one.tokens for one in found.sequences] == [output.prompt_token_ids + one for one in expected]
        assert [one.text for one in found.sequences] == [
            llm.get_tokenizer().decode(output.prompt_token_ids + one) for one in expected
        ]
        assert {answer.finish_reason for answer in output.outputs} == {"length"}
        sums = [answer.cumulative_logprob for answer in output.outputs]
        assert sums == sorted(sums, key=lambda one: -(one or 0.0))
        assert [one.cum_logprob for one in found.sequences] == pytest.approx(sums)


def test_a_beam_that_ends_is_shown_without_its_end(llm: LLM) -> None:
    """Without a penalty for its length a beam that has ended stays the most likely."""
    common: dict[str, Any] = {"n": 4, "use_beam_search": True, "temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
    end = llm.generate("x", SamplingParams(**common), use_tqdm=False)[0].outputs[0].token_ids[2]
    params = SamplingParams(**common, stop_token_ids=[end], length_penalty=0.0)
    stopped = [found for found in llm.generate("x", params, use_tqdm=False)[0].outputs if found.finish_reason == "stop"]
    assert stopped
    for answer in stopped:
        assert answer.token_ids.index(end) == len(answer.token_ids) - 1
        assert answer.stop_reason == end
        assert answer.text == llm.get_tokenizer().decode(answer.token_ids[:-1], skip_special_tokens=True)


def test_of_more_beams_the_best_are_the_answer(llm: LLM) -> None:
    common: dict[str, Any] = {"use_beam_search": True, "temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
    all_of_them = llm.generate("x", SamplingParams(n=4, **common), use_tqdm=False)[0].outputs
    best = llm.generate("x", SamplingParams(n=2, best_of=4, **common), use_tqdm=False)[0].outputs
    assert best == all_of_them[:2]


def test_best_of_keeps_the_most_likely(llm: LLM) -> None:
    common: dict[str, Any] = {"seed": 7, "max_tokens": 8, "ignore_eos": True}
    written = llm.generate("x", SamplingParams(n=5, logprobs=0, **common), use_tqdm=False)[0].outputs
    (output,) = llm.generate("x", SamplingParams(n=2, best_of=5, **common), use_tqdm=False)
    likely = sorted(written, key=lambda answer: -(answer.cumulative_logprob or 0.0))
    assert [answer.token_ids for answer in output.outputs] == [answer.token_ids for answer in likely[:2]]
    assert [answer.index for answer in output.outputs] == [0, 1]
    assert {answer.logprobs is None for answer in output.outputs} == {True}


def test_what_beams_cannot_do_is_refused_and_leaves_nothing(llm: LLM) -> None:
    with pytest.raises(RequestError, match="logprobs is 22"):
        llm.beam_search("x", BeamSearchParams(beam_width=11, max_tokens=4))
    with pytest.raises(ConfigError, match="temperature"):
        BeamSearchParams(beam_width=2, max_tokens=4, temperature=0.5)
    with pytest.raises(ConfigError, match="beam_width is 0"):
        BeamSearchParams(beam_width=0, max_tokens=4)
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(llm.beam_search("x", BeamSearchParams(beam_width=2, max_tokens=2))[0].sequences) == 2

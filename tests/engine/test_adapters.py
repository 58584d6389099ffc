"""Adapters: greedy answers are those of transformers with the adapter merged into its weights."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from baton_serve.contracts.block_hash import root_hash
from baton_serve.contracts.messages import Work
from baton_serve.engine import ConfigError, Engine, EngineConfig
from baton_serve.engine.config import Quantization
from baton_serve.engine.errors import AdapterError, RequestError
from baton_serve.engine.model.lora.adapter_files import read_adapter
from baton_serve.engine.model.lora.products import OutputSlice, add_products
from baton_serve.engine.model.lora.store import AdapterRows
from baton_serve.engine.model.quantized.formats import scheme
from tests.adapters import merged, write_adapter
from tests.engine import test_awq, test_bitsandbytes, test_fp8_checkpoints, test_gptq
from tests.engine.driving import hand_over, make_engine, make_work, run
from tests.engine.test_quantization import rounded
from tests.quantized_checkpoints import Writer, write_checkpoint
from tests.tiny_models import load_reference, write_tiny_model

PROMPT = [7 + (31 * i + i * i) % 200 for i in range(70)]
OTHER = PROMPT[:40] + [9 + (17 * i) % 190 for i in range(20)]


def adapted(engine: Engine, name: str, tokens: list[int], adapter: str = "", *, lora: str = "", **params: Any) -> Work:
    """A work of one of the loaded adapters, or of one by its fingerprint."""
    work = make_work(engine, name, tokens, ignore_eos=True, **params)
    if not adapter and not lora:
        return work
    lora = lora or next(one.fingerprint for one in engine.adapters.records() if one.name == adapter)
    layout = engine.layout
    root = root_hash(fingerprint=layout.fingerprint, kv_dtype=layout.dtype, block_tokens=layout.block_tokens, lora=lora)
    return msgspec.structs.replace(work, lora=lora, root=root)


def greedy(model: Any, prompt: Sequence[int], count: int = 12) -> list[int]:
    torch.set_num_threads(1)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([list(prompt)])
    limits = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), **limits)
    return [int(token) for token in answer[0, len(prompt) :]]


def lora_engine(model: Path, *adapters: Path, **settings: Any) -> Engine:
    values: dict[str, Any] = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 64, "dtype": "float32", **settings}
    return make_engine(model, lora_modules=tuple(f"{one.name}={one}" for one in adapters), **values)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def adapters(model: Path) -> list[Path]:
    """Of several ranks, of attention, of the MLP, of both; one with the other scale."""
    folder = model.parent
    return [
        write_adapter(folder / "all", model, rank=8, seed=1),
        write_adapter(folder / "attention", model, rank=3, targets=("q_proj", "k_proj", "v_proj", "o_proj"), seed=2),
        write_adapter(folder / "mlp", model, rank=32, targets=("gate_proj", "up_proj", "down_proj"), seed=3),
        write_adapter(folder / "value", model, rank=16, targets=("v_proj",), seed=4, use_rslora=True),
    ]


def expected_of(model: Path, adapters: Sequence[Path], prompt: list[int]) -> dict[str, list[int]]:
    references = {one.name: merged(model, one) for one in adapters} | {"": load_reference(model)}
    return {name: greedy(reference, prompt) for name, reference in references.items()}


@pytest.mark.parametrize("chunked", [False, True])
def test_a_batch_mixes_adapters_and_the_base_model(model: Path, adapters: list[Path], chunked: bool) -> None:
    expected = {prompt: expected_of(model, adapters, prompt_) for prompt, prompt_ in (("a", PROMPT), ("b", OTHER))}
    assert len({tuple(tokens) for tokens in expected["a"].values()}) == 5
    limits = {"max_num_batched_tokens": 32} if chunked else {}
    with lora_engine(model, *adapters, **limits) as engine:
        for again in ("", "2"):  # the second time prefixes are cached
            for key, prompt in (("a", PROMPT), ("b", OTHER)):
                for name in expected[key]:
                    engine.add(adapted(engine, f"{key}{name}{again}", prompt, name))
        answers = run(engine)
    assert answers == {
        (f"{key}{name}{n}", 0): expected[key][name] for key in "ab" for name in expected["a"] for n in ("", "2")
    }


def test_a_step_mixes_no_more_adapters_than_it_may(model: Path, adapters: list[Path]) -> None:
    expected = expected_of(model, adapters, PROMPT)
    mixed: set[int] = set()
    with lora_engine(model, *adapters, max_loras=2) as engine:
        compute = engine._runner._executor.compute

        def counted(arrays: Any, after_layer: Any = None) -> Any:
            mixed.add(len(arrays.adapters))
            return compute(arrays, after_layer)

        engine._runner._executor.compute = counted  # type: ignore[method-assign]
        for name in expected:
            engine.add(adapted(engine, name, PROMPT, name))
        assert run(engine) == {(name, 0): tokens for name, tokens in expected.items()}
    assert max(mixed) == 2


def test_a_handoff_carries_the_adapter(model: Path, adapters: list[Path]) -> None:
    expected = expected_of(model, adapters[:1], PROMPT)
    with lora_engine(model, adapters[0]) as source, lora_engine(model, adapters[0]) as sink:
        for name, tokens in expected.items():
            work = adapted(source, f"request {name}", PROMPT, name)
            assert hand_over(source, sink, work) == {(f"request {name}", 0): tokens}


@pytest.mark.parametrize(
    "family", ["qwen2", "qwen3", "gemma2", "granite", "cohere", "qwen2_moe", "phi3", "mixtral", "qwen3_5", "falcon_h1"]
)
def test_other_families_too(tmp_path: Path, family: str) -> None:
    """Through fused layers, and through transformers' own where those do not fit."""
    model = write_tiny_model(tmp_path / "model", family)
    targets = (
        ("qkv_proj", "o_proj", "gate_up_proj", "down_proj") if family == "phi3" else ("q_proj", "v_proj", "o_proj")
    )
    adapter = write_adapter(tmp_path / "adapter", model, targets=targets)
    with lora_engine(model, adapter) as engine:
        engine.add(adapted(engine, "with", PROMPT, "adapter"))
        engine.add(adapted(engine, "without", PROMPT))
        answers = run(engine)
    assert answers["with", 0] == greedy(merged(model, adapter), PROMPT)
    assert answers["without", 0] == greedy(load_reference(model), PROMPT)
    assert answers["with", 0] != answers["without", 0]


@pytest.mark.parametrize("name", ["int8", "asym_int4", "sym_int4", "fp8"])
def test_quantized_weights_take_adapters_too(model: Path, adapters: list[Path], name: Quantization) -> None:
    how = scheme(name, fp8_dtype="e4m3", group_size=32)
    expected = {one.name: greedy(merged(rounded(model, how), one), PROMPT) for one in adapters[:3]}
    expected[""] = greedy(rounded(model, how), PROMPT)
    with lora_engine(model, *adapters, quantization=name, quantization_group_size=32) as engine:
        for name_ in expected:
            engine.add(adapted(engine, name_, PROMPT, name_))
        assert run(engine) == {(one, 0): tokens for one, tokens in expected.items()}


CHECKPOINTS: dict[str, tuple[Writer, dict[str, Any], dict[str, Any]]] = {
    "awq": (test_awq.writer(), test_awq.stated(), {}),
    "gptq": (test_gptq.writer(), test_gptq.stated(), {}),
    "gptq with an order": (test_gptq.writer(sym=False, order=True), test_gptq.stated(sym=False, desc_act=True), {}),
    "gptq with 8 bits": (test_gptq.writer(bits=8), test_gptq.stated(bits=8), {}),
    "bitsandbytes": (test_bitsandbytes.writer("nf4", is_double=True), test_bitsandbytes.stated("nf4"), {}),
    "bitsandbytes fp4": (test_bitsandbytes.writer("fp4"), test_bitsandbytes.stated("fp4"), {}),
    "fp8 in blocks": (test_fp8_checkpoints.blocks, test_fp8_checkpoints.STATED, test_fp8_checkpoints.SIZES),
    "fp8": (test_fp8_checkpoints.whole, {"quant_method": "fp8", "activation_scheme": "static"}, {}),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_in_few_bits_take_adapters_too(tmp_path: Path, name: str) -> None:
    """An adapter beside weights of bitsandbytes is what QLoRA trains."""
    write, config, sizes = CHECKPOINTS[name]
    numbers = write_checkpoint(tmp_path / "model", write, config, **sizes)
    adapter = write_adapter(tmp_path / "adapter", tmp_path / "model-plain", seed=5)
    expected = [greedy(numbers, PROMPT), greedy(merged(numbers, adapter), PROMPT)]
    with lora_engine(tmp_path / "model", adapter) as engine:
        engine.add(adapted(engine, "without", PROMPT))
        engine.add(adapted(engine, "with", PROMPT, "adapter"))
        answers = run(engine)
    assert [answers["without", 0], answers["with", 0]] == expected
    assert expected[0] != expected[1]


def test_the_cpus_own_dtype_takes_adapters(model: Path, adapters: list[Path]) -> None:
    """Batched as alone; without adapters it is C++ that computes, with them torch."""
    alone: dict[tuple[str, int], list[int]] = {}
    with lora_engine(model, *adapters, dtype="bfloat16") as engine:
        for name in ("all", "mlp", ""):
            engine.add(adapted(engine, name, PROMPT, name))
            alone |= run(engine)
        for name in ("all", "mlp", ""):
            engine.add(adapted(engine, name, PROMPT, name))
        assert run(engine) == alone
    assert len({tuple(tokens) for tokens in alone.values()}) == 3


def test_adapters_may_have_another_dtype_than_the_model(model: Path, adapters: list[Path]) -> None:
    fingerprints, answers = [], []
    for lora_dtype in ("auto", "float32", "bfloat16"):
        with lora_engine(model, *adapters[:1], lora_dtype=lora_dtype) as engine:
            fingerprints.append(engine.adapters.records()[0].fingerprint)
            engine.add(adapted(engine, "all", PROMPT, "all"))
            answers.append(run(engine)["all", 0])
    # Blocks of instances with other rounding must not be exchanged.
    assert fingerprints[0] == fingerprints[1] and fingerprints[2] == f"{fingerprints[0]}bfloat16"
    assert answers[0] == answers[1] == expected_of(model, adapters[:1], PROMPT)["all"]
    assert len(answers[2]) == 12


def test_products_are_computed_in_the_dtype_of_the_adapter(adapters: list[Path]) -> None:
    adapter = read_adapter("all", adapters[0], dtype=torch.bfloat16)
    module, product = next(iter(adapter.products.items()))
    x = torch.randn(5, product.down.shape[1], generator=torch.Generator().manual_seed(1))
    output = torch.zeros(5, product.up.shape[0])
    part = OutputSlice(module, 0, product.up.shape[0])
    add_products(output, x, [part], [AdapterRows(adapter, torch.tensor([1, 3]))])
    expected = (x[[1, 3]].bfloat16() @ product.down.T) @ product.up.T
    torch.testing.assert_close(output[[1, 3]], expected.float(), rtol=1e-2, atol=1e-2)
    assert not output[[0, 2, 4]].any()


def test_adapters_come_and_go(model: Path, adapters: list[Path]) -> None:
    expected = expected_of(model, adapters[:1], PROMPT)["all"]
    with lora_engine(model) as engine:
        engine.adapters.load("all", str(adapters[0]))
        engine.add(adapted(engine, "a", PROMPT, "all"))
        first = engine.step().tokens[0].token_ids
        work = adapted(engine, "b", PROMPT, "all")
        engine.adapters.unload("all")
        assert not engine.adapters.records()
        engine.add(work)  # its router had not heard yet
        answers = run(engine)
        assert first + answers["a", 0] == answers["b", 0] == expected
        engine.adapters.collect()
        with pytest.raises(RequestError, match="not loaded"):
            engine.add(adapted(engine, "c", PROMPT, lora=work.lora))
        with pytest.raises(AdapterError, match="no adapter is named all"):
            engine.adapters.unload("all")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "too high a rank": ({"rank": 65}, "rank 65, the limit is 64"),
    "DoRA": ({"use_dora": True}, "use_dora = True is not supported"),
    "biases": ({"bias": "all"}, "bias = 'all' is not supported"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save.*not supported; merge the adapter"),
    "parameters of experts": ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters.*not supported"),
    "the head": ({"targets": ("lm_head",)}, "changes lm_head, the head, which adapters cannot change: merge"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(model: Path, tmp_path: Path, case: str) -> None:
    how, message = REFUSED[case]
    adapter = write_adapter(tmp_path / "adapter", model, **how)
    with lora_engine(model) as engine, pytest.raises(AdapterError, match=message):
        engine.adapters.load("adapter", str(adapter))


def test_layers_with_recurrent_states_keep_their_weights(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", "qwen3_5")
    adapter = write_adapter(tmp_path / "adapter", model, targets=("q_proj", "in_proj_qkv"))
    with (
        lora_engine(model) as engine,
        pytest.raises(AdapterError, match=r"linear_attn.in_proj_qkv, part of a layer with recurrent states"),
    ):
        engine.adapters.load("adapter", str(adapter))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("model.layers.0.mlp.experts.0.w1.lora_A", "a weight of experts, which adapters cannot change: merge"),
        ("model.embed_tokens.lora_A", "the embedding, which adapters cannot change: merge"),
        ("model.embed_tokens.lora_embedding_A", "no LoRA matrix of a linear layer.*merge the adapter"),
        ("model.layers.0.self_attn.q_proj.lora_magnitude_vector", "no LoRA matrix of a linear layer"),
        ("model.layers.0.unknown.lora_A", "not a linear layer of this model: load an adapter that was trained for"),
    ],
)
def test_weights_that_are_no_plain_products_are_refused_with_a_remedy(
    model: Path, tmp_path: Path, key: str, message: str
) -> None:
    adapter = write_adapter(tmp_path / "adapter", model, rank=2, targets=())
    tensors = {f"base_model.model.{key}.weight": torch.ones(2, 64)}
    if key.endswith("lora_A"):
        tensors[f"base_model.model.{key.removesuffix('A')}B.weight"] = torch.ones(64, 2)
    save_file(tensors, adapter / "adapter_model.safetensors")
    with lora_engine(model) as engine, pytest.raises(AdapterError, match=message):
        engine.adapters.load("adapter", str(adapter))


def test_a_replaced_adapter_answers_with_its_new_weights_and_older_requests_with_their_own(
    model: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "adapter", model, seed=1)
    expected = [greedy(merged(model, folder), PROMPT)]
    with lora_engine(model, folder) as engine:
        engine.add(adapted(engine, "old", PROMPT, "adapter"))
        first = engine.step().tokens[0].token_ids
        write_adapter(folder, model, seed=2)
        expected.append(greedy(merged(model, folder), PROMPT))
        engine.adapters.put(engine.adapters.read("adapter", str(folder)))
        engine.add(adapted(engine, "new", PROMPT, "adapter"))
        answers = run(engine)
        assert len(engine.adapters.records()) == 1
    assert [first + answers["old", 0], answers["new", 0]] == expected
    assert expected[0] != expected[1]


def test_an_adapter_of_another_model_or_of_none_is_refused(model: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", hidden_size=128)
    adapter = write_adapter(tmp_path / "adapter", other, targets=("q_proj",))
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "adapter_config.json").write_text(json.dumps({"r": 8}))
    (tmp_path / "rankless").mkdir()
    (tmp_path / "rankless" / "adapter_config.json").write_text(json.dumps({"lora_alpha": 8}))
    with lora_engine(model) as engine:
        for folder, message in (
            (adapter, "other sizes than this"),
            ("empty", "adapter_config"),
            ("broken", "safetensors"),
            ("rankless", "no integer field 'r'"),
        ):
            with pytest.raises(AdapterError, match=message):
                engine.adapters.load("adapter", str(tmp_path / folder))


def test_settings_that_cannot_be(model: Path) -> None:
    for settings, message in (
        ({"lora_modules": ("a=b",)}, "needs enable_lora"),
        ({"enable_lora": True, "lora_modules": ("a",)}, "name=folder"),
        ({"enable_lora": True, "lora_modules": ('{"name": "a"}',)}, "missing required field `path`"),
        ({"enable_lora": True, "lora_modules": ('{"name": "a", "path": "b", "rank": 3}',)}, "unknown field `rank`"),
        ({"enable_lora": True, "lora_modules": ("a=b", '{"name": "a", "path": "c"}')}, "several adapters are named a"),
        ({"enable_lora": True, "max_loras": 0}, "max_loras"),
        ({"enable_lora": True, "max_loras": 3, "max_cpu_loras": 2}, "max_cpu_loras is 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineConfig(model=str(model), **settings).check()
    with make_engine(model) as engine, pytest.raises(AdapterError, match="--enable-lora"):
        engine.adapters.load("a", "b")


def weights_of(engine: Engine) -> list[str]:
    """The names of the adapters whose weights are on the device, the least recently used first."""
    assert engine._store is not None
    names = {one.fingerprint: one.name for one in engine.adapters.records()}
    return [names.get(fingerprint, "") for fingerprint in engine._store._weights]


def test_the_least_recently_used_adapter_makes_room_and_is_read_again(model: Path, adapters: list[Path]) -> None:
    expected = {one.name: greedy(merged(model, one), PROMPT) for one in adapters[:3]}
    one, two, three = expected
    with lora_engine(model, *adapters[:2], max_loras=1, max_cpu_loras=2) as engine:
        engine.adapters.load(three, str(adapters[2]))
        assert weights_of(engine) == [two, three]
        assert [found.name for found in engine.adapters.records()] == [one, two, three]
        for number, name in enumerate((one, two, three, one, three)):
            engine.add(adapted(engine, str(number), PROMPT, name))
            assert run(engine) == {(str(number), 0): expected[name]}
        assert weights_of(engine) == [one, three]


def test_more_adapters_than_there_is_room_for_take_turns(model: Path, adapters: list[Path]) -> None:
    with lora_engine(model, *adapters[:1], max_loras=1, max_cpu_loras=1) as engine:
        for one in adapters[1:4]:
            engine.adapters.load(one.name, str(one))
        for one in (*adapters[:4], *adapters[:4]):
            engine.add(adapted(engine, f"{one.name}{len(engine._table.requests)}", PROMPT, one.name))
        answers = run(engine)
        assert len(answers) == 8
        for (request, _), tokens in answers.items():
            folder = next(one for one in adapters if request.startswith(one.name))
            assert tokens == greedy(merged(model, folder), PROMPT)
        assert len(weights_of(engine)) == 1


def test_a_decoding_request_keeps_its_adapter_while_others_are_loaded(model: Path, adapters: list[Path]) -> None:
    with lora_engine(model, *adapters[:1], max_loras=1, max_cpu_loras=1) as engine:
        name = adapters[0].name
        engine.add(adapted(engine, "a", PROMPT, name))
        first = engine.step().tokens[0].token_ids
        engine.adapters.load("other", str(adapters[1]))
        assert weights_of(engine) == [name]
        assert first + run(engine)["a", 0] == greedy(merged(model, adapters[0]), PROMPT)
        engine.add(adapted(engine, "b", PROMPT, "other"))
        assert run(engine)["b", 0] == greedy(merged(model, adapters[1]), PROMPT)


def test_adapters_take_turns_on_the_decode_side_of_a_handoff(model: Path, adapters: list[Path]) -> None:
    one, two = adapters[:2]
    with (
        lora_engine(model, one, two, max_loras=1, max_cpu_loras=2) as prefill,
        lora_engine(model, one, max_loras=1, max_cpu_loras=1) as decode,
    ):
        decode.adapters.load(two.name, str(two))
        for name in (two.name, one.name, two.name):
            folder = next(each for each in (one, two) if each.name == name)
            answers = hand_over(prefill, decode, adapted(prefill, name, PROMPT, name))
            assert answers == {(name, 0): greedy(merged(model, folder), PROMPT)}
            assert weights_of(decode) == [name]


def test_an_adapter_whose_files_have_changed_fails_its_requests_alone(model: Path, tmp_path: Path) -> None:
    folders = [write_adapter(tmp_path / name, model, seed=seed) for seed, name in enumerate(("one", "two"))]
    expected = greedy(merged(model, folders[1]), PROMPT)
    with lora_engine(model, folders[0], max_cpu_loras=1, max_loras=1) as engine:
        engine.adapters.load("two", str(folders[1]))
        work = adapted(engine, "late", PROMPT, "one")
        for request in ("a", "b"):
            engine.add(adapted(engine, f"two{request}", PROMPT, "two"))
            assert run(engine) == {(f"two{request}", 0): expected}
        write_adapter(folders[0], model, seed=7)
        engine.add(work)
        engine.add(adapted(engine, "c", PROMPT, "two"))
        answers: list[int] = []
        failed: list[tuple[str, str, str]] = []
        while engine.has_work():
            result = engine.step()
            failed += [(one.request_id, one.code, one.message) for one in result.failed]
            answers += [token for output in result.tokens for token in output.token_ids]
        assert [(name, code) for name, code, _ in failed] == [("late", "invalid")]
        assert "have changed since it was loaded: load it again with load_inplace" in failed[0][2]
        assert answers == expected
        engine.adapters.put(engine.adapters.read("one", str(folders[0])))
        engine.add(adapted(engine, "d", PROMPT, "one"))
        assert run(engine)["d", 0] == greedy(merged(model, folders[0]), PROMPT)


def test_a_request_whose_adapter_is_unloaded_while_it_waits_for_the_weights_fails(
    model: Path, adapters: list[Path]
) -> None:
    one, two = adapters[:2]
    with lora_engine(model, one, max_cpu_loras=1, max_loras=1) as engine:
        engine.adapters.load("two", str(two))
        engine.add(adapted(engine, "a", PROMPT, one.name))
        engine.step()
        engine.add(adapted(engine, "b", PROMPT, "two"))
        engine.adapters._reads.clear()  # as if its weights had not been begun to read
        engine.adapters.unload("two")
        failed = []
        while engine.has_work():
            failed += engine.step().failed
        assert [(one.request_id, one.code) for one in failed] == [("b", "invalid")]


def test_names_of_adapters_are_limited(model: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton_serve.engine.model.lora.store.MAX_ADAPTERS", 2)
    with lora_engine(model, *adapters[:2]) as engine:
        with pytest.raises(AdapterError, match="2 adapters are loaded, the largest number: unload one first"):
            engine.adapters.load("three", str(adapters[2]))
        engine.adapters.unload(adapters[0].name)
        engine.adapters.load("three", str(adapters[2]))


@pytest.mark.parametrize("pipe", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_named_pipe_in_place_of_an_adapters_file_is_an_error_and_is_not_waited_for(tmp_path: Path, pipe: str) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 2}')
    (folder / pipe).unlink(missing_ok=True)
    os.mkfifo(folder / pipe)
    with pytest.raises(AdapterError, match=f"{pipe} cannot be read: it is not a regular file"):
        read_adapter("pipe", folder, dtype=torch.float32)

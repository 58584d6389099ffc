"""Writes tiny random models in Hugging Face's format: config, safetensors, tokenizer, chat template.

Deterministic by family and seed. The weights are drawn wide, so that greedy answers vary and depend on every
token of the context: a lost or misplaced block changes them.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CLIPImageProcessorPil,
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessorPil,
    SiglipImageProcessorPil,
)

from tests import families
from tests.families import EOS_ID, MAX_POSITIONS

IM_START_ID = 257
IM_END_ID = 258
MERGES = ["t h", "th e", "Ġ the", "i n", "a n", "an d", "Ġ and", "e r", "o u", "in g", "Ġ a", "r e"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

IMAGE_ID = 271
IMAGE_SIZE, PATCH_SIZE = 16, 4
IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2
GRID = [[16, 32], [32, 16], [32, 32], [48, 16]]
"""Sizes that tiles may make together."""
VISION_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

FAMILIES = {name: family.config for name, family in families.FAMILIES.items()}


def write_tiny_model(folder: Path, family: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
    """Makes `folder`. `overrides` replace entries of the config. float32."""
    values = {**FAMILIES[family], **overrides}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _widen(model.named_parameters)
        for name, buffer in model.named_buffers():
            if name.endswith("score_correction_bias"):  # it starts at 0, which corrects nothing
                buffer.normal_(0.0, 0.1)
    model.generation_config = GenerationConfig(eos_token_id=[EOS_ID, IM_END_ID], bos_token_id=EOS_ID)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tiny_llava(
    folder: Path, text: str = "llama", tower: str = "clip", *, tiles: bool = False, seed: int = 0, **overrides: Any
) -> Path:
    """As `write_tiny_model`: LLaVA with a tower of `clip` or `siglip`. An image is `IMAGE_TOKENS` tokens; with `tiles`,
    which is LLaVA-NeXT, more. `overrides` are of the decoder's config."""
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    vision = {**sizes, "model_type": f"{tower}_vision_model", "image_size": IMAGE_SIZE, "patch_size": PATCH_SIZE}
    more = {"image_grid_pinpoints": GRID} if tiles else {"image_seq_length": IMAGE_TOKENS}
    config = (LlavaNextConfig if tiles else LlavaConfig)(
        vision_config={**vision, "initializer_range": 0.15},
        text_config={**FAMILIES[text], **overrides},
        image_token_index=IMAGE_ID,
        vision_feature_select_strategy="default" if tower == "clip" else "full",
        **more,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind = LlavaNextForConditionalGeneration if tiles else LlavaForConditionalGeneration
        model = kind._from_config(config, dtype=torch.float32)
        _widen(model.named_parameters)
        with torch.no_grad():  # else all images are much alike to the decoder
            for parameter in model.model.vision_tower.parameters():
                parameter.mul_(1.5)
            for parameter in model.model.multi_modal_projector.parameters():
                parameter.normal_(0.0, 0.5)
    model.generation_config = GenerationConfig(eos_token_id=[EOS_ID, IM_END_ID], bos_token_id=EOS_ID)
    model.save_pretrained(folder)
    edge = {"shortest_edge": IMAGE_SIZE}
    if tiles:
        processor = LlavaNextImageProcessorPil(size=edge, crop_size=size, image_grid_pinpoints=GRID)
    else:
        processor = CLIPImageProcessorPil(size=edge, crop_size=size)
    (processor if tiles or tower == "clip" else SiglipImageProcessorPil(size=size)).save_pretrained(folder)
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<image>"])
    assert tokenizer.token_to_id("<image>") == IMAGE_ID
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": VISION_TEMPLATE}))
    return folder


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE: ids 0..255 are the bytes, then the special tokens, then a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: number for number, symbol in enumerate(alphabet)}
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    for token in [*special, *(merge.replace(" ", "") for merge in MERGES)]:
        vocab[token] = len(vocab)
    merges = [(left, right) for left, right in (merge.split(" ") for merge in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _widen(named_parameters: Callable[[], Any]) -> None:
    """Some families start their biases and norms at constants: draw those too."""
    with torch.no_grad():
        for name, parameter in named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
            elif parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def load_reference(folder: Path) -> Any:
    """transformers' own model, in float32. Some versions give soft-capped scores to SDPA, which does not cap."""
    is_capped = json.loads((folder / "config.json").read_text()).get("attn_logit_softcapping") is not None
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager" if is_capped else None
    )

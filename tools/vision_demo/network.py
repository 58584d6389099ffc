"""The network of the vision demo: LLaVA with a small SigLIP tower and a small Llama, and the files of its folder."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import (
    CLIPImageProcessorPil,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipVisionConfig,
)

from tools.demo_model.tokenization import BEGIN, CHAT_TEMPLATE, END, PAD, SPECIAL, save_tokenizer, train_tokenizer
from tools.vision_demo.pictures import EDGE, VisualQuestion

IMAGE = "<image>"
PATCH = 8
NUM_PATCHES = (EDGE // PATCH) ** 2
MAX_TOKENS = 512
_TEXT_PART = "{{- part['text'] }}"
_TEMPLATE = CHAT_TEMPLATE.replace(
    "{%- for part in content if part['type'] == 'text' %}" + _TEXT_PART,
    "{%- for part in content %}{%- if part['type'] == 'image' %}{{- '<image>' }}"
    "{%- else %}" + _TEXT_PART + "{%- endif %}",
)
"""The chat template of the demo model, with a placeholder for each picture."""
assert _TEMPLATE != CHAT_TEMPLATE


def vision_config(ids: dict[str, int], *, vocab_size: int) -> LlavaConfig:
    """Return the shape of the network; `ids` are those of the special tokens."""
    text = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=ids[BEGIN],
        eos_token_id=ids[END],
        pad_token_id=ids[PAD],
    )
    tower = SiglipVisionConfig(
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=3,
        image_size=EDGE,
        patch_size=PATCH,
        vision_use_head=False,
    )
    return LlavaConfig(
        vision_config=tower,
        text_config=text,
        image_token_index=ids[IMAGE],
        image_seq_length=NUM_PATCHES,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    )


def initialise(model: LlavaForConditionalGeneration, *, seed: int) -> None:
    """Draw the weights: by the width of their input, and narrow where they write to the residual stream."""
    torch.manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            (torch.nn.init.zeros_ if name.endswith("bias") else torch.nn.init.ones_)(weight)
        elif "embed_tokens" in name or "position_embedding" in name:
            torch.nn.init.normal_(weight, std=0.02 if "embed_tokens" in name else 0.3)
        else:
            std = weight[0].numel() ** -0.5
            is_output = name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight", "fc2.weight"))
            torch.nn.init.normal_(weight, std=std / 3 if is_output else std)


def make_tokenizer(asked: list[VisualQuestion], *, vocab_size: int) -> Tokenizer:
    """Train a tokenizer on the texts of these questions and add the placeholder of a picture."""
    texts = [text for question in asked for text in (question.text, question.answer)]
    tokenizer = train_tokenizer(texts, vocab_size=vocab_size)
    tokenizer.add_special_tokens([IMAGE])
    return tokenizer


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the numbers of the special tokens."""
    known = tokenizer.get_vocab()
    return {token: known[token] for token in (*SPECIAL, IMAGE)}


def image_processor() -> CLIPImageProcessorPil:
    """Return the image processor: it resizes to `EDGE` and maps 0 to 255 to -1 to 1."""
    half = [0.5, 0.5, 0.5]
    size = {"height": EDGE, "width": EDGE}
    return CLIPImageProcessorPil(size={"shortest_edge": EDGE}, crop_size=size, image_mean=half, image_std=half)


def save_model(folder: Path, model: LlavaForConditionalGeneration, tokenizer: Tokenizer) -> None:
    """Write all files of the model to `folder`, the weights in bfloat16."""
    half = LlavaForConditionalGeneration(model.config)
    half.load_state_dict(model.state_dict())
    half.tie_weights()
    half.to(torch.bfloat16)
    text = model.config.text_config
    half.generation_config = GenerationConfig(
        bos_token_id=text.bos_token_id, eos_token_id=text.eos_token_id, pad_token_id=text.pad_token_id
    )
    half.save_pretrained(folder)
    image_processor().save_pretrained(folder)
    save_tokenizer(tokenizer, folder, max_tokens=MAX_TOKENS)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": _TEMPLATE}, indent=2) + "\n")

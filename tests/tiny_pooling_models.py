"""Writes tiny random models that answer with vectors: encoders and decoders, with and without a head."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    CLIPImageProcessorPil,
    Qwen2VLImageProcessorPil,
    SiglipImageProcessorPil,
)

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "no",
    "yes",
    "the",
    "baton",
    "block",
    "is",
    "handed",
    "over",
    "a",
    "cat",
    "?",
]
VOCAB_SIZE = 64

_ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
_DECODER: dict[str, Any] = {**_ENCODER, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {**_ENCODER, "model_type": "bert", "max_position_embeddings": 64, "type_vocab_size": 2},
    "xlm-roberta": {**_ENCODER, "model_type": "xlm-roberta", "pad_token_id": 1, "type_vocab_size": 1},
    "modernbert": {**_ENCODER, "model_type": "modernbert", "cls_token_id": 2, "sep_token_id": 3, "local_attention": 8},
    "qwen3": {**_DECODER, "model_type": "qwen3"},
    "llama": {**_DECODER, "model_type": "llama"},
}
CLASSES = {
    "embed": AutoModel,
    "classify": AutoModelForSequenceClassification,
    "generate": AutoModelForCausalLM,
}


def write_pooling_model(folder: Path, family: str, kind: str = "embed", *, seed: int = 0, **overrides: Any) -> Path:
    """Makes `folder`. `kind` is embed, classify or generate. float32."""
    values = {**FAMILIES[family], **overrides}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CLASSES[kind].from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    write_word_tokenizer(folder, is_encoder=family not in ("qwen3", "llama"))
    return folder


def write_word_tokenizer(folder: Path, *, is_encoder: bool) -> None:
    """A word a token; encoders frame texts and pairs with [CLS] and [SEP]."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    if is_encoder:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_modules(folder: Path, mode: str, *, normalize: bool = True, dense: int | None = None) -> None:
    """Write the files of Sentence Transformers: `mode` is one of its pooling modes, `dense` the size of a layer after
    pooling."""
    parts = [("Transformer", ""), ("Pooling", "1_Pooling")]
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    if dense is not None:
        from safetensors.torch import save_file

        size = int(_ENCODER["hidden_size"])
        parts.append(("Dense", "2_Dense"))
        (folder / "2_Dense").mkdir()
        rules = {"in_features": size, "out_features": dense, "bias": True}
        rules_text = json.dumps({**rules, "activation_function": "torch.nn.modules.activation.Tanh"})
        (folder / "2_Dense" / "config.json").write_text(rules_text)
        generator = torch.Generator().manual_seed(5)
        weights = {
            "linear.weight": torch.randn(dense, size, generator=generator),
            "linear.bias": torch.randn(dense, generator=generator),
        }
        save_file(weights, folder / "2_Dense" / "model.safetensors")
    if normalize:
        parts.append(("Normalize", "3_Normalize"))
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in parts]
    (folder / "modules.json").write_text(json.dumps(modules))


IMAGE_SIDE = 16
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": IMAGE_SIDE,
    "patch_size": 4,
}
_TEXTS = {**_ENCODER, "max_position_embeddings": 20, "bos_token_id": 2, "eos_token_id": 3}
_PAGE_TOKENS = ["<image>", "<bos>", "<pad>", "\n", "<|image_pad|>", "<|endoftext|>"]
PAGE_TEXT, QUESTION = "a block", "is "


def _two_towers(kind: str) -> dict[str, Any]:
    if kind == "clip":
        sizes = {"projection_dim": 12}
        return {"text_config": {**_TEXTS, **sizes}, "vision_config": {**_TOWER, **sizes}, **sizes}
    return {"text_config": {**_TEXTS, "projection_size": 32, "pad_token_id": 1}, "vision_config": _TOWER}


def _pages(kind: str) -> dict[str, Any]:
    vocab = len(WORDS) + len(_PAGE_TOKENS)
    text = {**_DECODER, "vocab_size": vocab, "num_key_value_heads": 2}
    if kind == "colpali":
        vlm: dict[str, Any] = {
            "model_type": "paligemma",
            "text_config": {**text, "model_type": "gemma"},
            "vision_config": {**_TOWER, "model_type": "siglip_vision_model", "projection_dim": 32},
            "projection_dim": 32,
            "image_token_index": vocab - 6,
        }
    else:
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
        vlm = {
            "model_type": "qwen2_vl",
            "text_config": {**text, "rope_parameters": rope},
            "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4},
            "image_token_id": vocab - 2,
            "video_token_id": vocab + 1,
        }
    return {"vlm_config": vlm, "embedding_dim": 8}


def write_image_embedder(folder: Path, kind: str, *, seed: int = 0) -> Path:
    """Makes `folder` with a tiny CLIP, SigLIP, ColPali or ColQwen2, its tokenizer and image processor. float32."""
    is_page = kind.startswith("col")
    config = AutoConfig.for_model(kind, **(_pages(kind) if is_page else _two_towers(kind)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = (AutoModelForPreTraining if is_page else AutoModel).from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.2) if parameter.dim() > 1 else parameter.add_(
                    torch.randn_like(parameter) * 0.1
                )
    model.save_pretrained(folder)
    write_word_tokenizer(folder, is_encoder=not is_page)
    side = {"height": IMAGE_SIDE, "width": IMAGE_SIDE}
    if kind == "colqwen2":
        limits = {"shortest_edge": 4 * 8 * 8, "longest_edge": 16 * 8 * 8}
        Qwen2VLImageProcessorPil(patch_size=4, size=limits).save_pretrained(folder)
    elif kind == "clip":
        CLIPImageProcessorPil(size={"shortest_edge": IMAGE_SIDE}, crop_size=side).save_pretrained(folder)
    else:
        SiglipImageProcessorPil(size=side).save_pretrained(folder)
    if is_page:
        _write_page_processor(folder, kind)
    return folder


def _write_page_processor(folder: Path, kind: str) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(_PAGE_TOKENS)
    tokenizer.save(str(folder / "tokenizer.json"))
    pad, page = ("<pad>", PAGE_TEXT) if kind == "colpali" else ("<|endoftext|>", f"is <|image_pad|> {PAGE_TEXT}")
    names = {"pad_token": pad, "bos_token": "<bos>", "unk_token": "[UNK]", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    texts = {"visual_prompt_prefix": page, "query_prefix": QUESTION}
    (folder / "processor_config.json").write_text(json.dumps(texts))

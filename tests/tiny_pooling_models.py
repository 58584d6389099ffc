"""Writes tiny random models that answer with vectors: encoders and decoders, with and without a head."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

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

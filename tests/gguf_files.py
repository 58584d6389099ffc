"""Folders whose weights lie in a GGUF file, written by the format's own package, for tests."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.tiny_models import write_tiny_model

Kind = gguf.GGMLQuantizationType
F32 = Kind.F32
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def blocks(kind: Kind, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random blocks of codes [outputs, bytes] with factors of the size that weights have."""
    generator = np.random.default_rng(seed)
    per, size = gguf.GGML_QUANT_SIZES[kind]
    size_of_all = (shape[0], shape[1] // per, size)
    made = np.frombuffer(generator.bytes(math.prod(size_of_all)), dtype=np.uint8).reshape(size_of_all).copy()
    factors = generator.uniform(2e-4, 1e-3, (*made.shape[:2], 2)).astype(np.float16).view(np.uint8)
    if kind in (Kind.Q3_K, Kind.Q6_K):
        made[..., -2:] = factors[..., :2]
    elif kind == Kind.Q2_K:
        made[..., -4:] = factors
    else:
        made[..., :2] = factors[..., :2]
        if kind in (Kind.Q4_1, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K):
            made[..., 2:4] = factors[..., 2:]
    return made.reshape(shape[0], -1)


def write_gguf(
    folder: Path,
    kind_of: Callable[[str], Kind],
    family: str = "qwen2",
    describe: Callable[[gguf.GGUFWriter], None] = lambda _: None,
    tensors_per_file: int = 0,
    **changes: int,
) -> torch.nn.Module:
    """Makes `folder`, whose weights lie in a GGUF file; returns transformers' model of the numbers they stand for."""
    sizes: dict[str, int] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, **changes}
    plain = write_tiny_model(folder.with_name("plain"), family, **sizes)
    write_tiny_model(folder, family, **sizes)
    (folder / "model.safetensors").unlink()
    writer = gguf.GGUFWriter(folder / "model.gguf", family, split_max_tensors=tensors_per_file)
    config = AutoModelForCausalLM.from_pretrained(plain).config
    _describe(writer, config)
    describe(writer)
    numbers = load_file(plain / "model.safetensors")
    for name, tensor in numbers.items():
        stem, _, leaf = name.rpartition(".")
        layer = stem.split(".")[2] if stem.startswith("model.layers") else None
        short = NAMES[stem if layer is None else stem.removeprefix(f"model.layers.{layer}.")]
        stored = f"{short}.{leaf}" if layer is None else f"blk.{layer}.{short}.{leaf}"
        used = kind_of(name) if tensor.dim() == 2 else F32
        codes = tensor.numpy() if used == F32 else blocks(used, tuple(tensor.shape))
        writer.add_tensor(stored, codes, raw_dtype=used)
        meant = np.array(gguf.quants.dequantize(codes, used))
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(stem[-6:])
        if family == "llama" and heads is not None:  # llama.cpp stores pairs of rotated rows side by side
            meant = meant.reshape(heads, -1, 2, meant.shape[-1]).swapaxes(1, 2)
        numbers[name] = torch.from_numpy(meant.copy()).view(tensor.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    return cast(torch.nn.Module, AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32))


def write_lone_gguf(folder: Path, kind: Kind, tokenizer: Path, *, tensors_per_file: int = 0) -> Path:
    """A llama whose file holds config and tokenizer too; nothing else is in `folder`. `folder`'s neighbour `plain` has
    the numbers it stands for, in Hugging Face's format. With `tensors_per_file` it is split, and this is the first
    part."""
    vocabulary = json.loads((tokenizer / "tokenizer.json").read_text())
    size = len(vocabulary["model"]["vocab"])

    def describe(writer: gguf.GGUFWriter) -> None:
        tokens, types = [""] * size, [int(gguf.TokenType.NORMAL)] * size
        for token, number in vocabulary["model"]["vocab"].items():
            tokens[number] = token
        for added in vocabulary["added_tokens"]:
            tokens[added["id"]], types[added["id"]] = added["content"], int(gguf.TokenType.CONTROL)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges([" ".join(pair) for pair in vocabulary["model"]["merges"]])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(True)
        writer.add_chat_template(json.loads((tokenizer / "tokenizer_config.json").read_text())["chat_template"])

    write_gguf(
        folder, projections(kind), "llama", describe=describe, tensors_per_file=tensors_per_file, vocab_size=size
    )
    for beside in folder.iterdir():
        if beside.suffix != ".gguf":
            beside.unlink()
    return min(folder.iterdir())


def _describe(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)


def projections(kind: Kind) -> Callable[[str], Kind]:
    return lambda name: kind if name.endswith("_proj.weight") else F32

"""Derives config.json, tokenizer and default sampling parameters from the metadata of a GGUF file, for known dense
decoders.

The result is the same as that of transformers, which needs seconds for it. Anything that is not known here yields None,
and transformers derives it.
"""

from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from baton_serve.engine.loading.gguf_header import GgufFile

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Classes of transformers by llama.cpp's names of architectures."""
DTYPE = "bfloat16"
"""Dtype in which such a model computes by default; `--dtype` overrides it. The file has weights of several types."""
DEFAULT_ROPE_THETA = 10000.0
"""Base of the rotary frequencies if the file does not state it, as in llama.cpp."""
OTHER_ROTATION = ("rope.scaling.type", "rope.scaling.factor", "expert_count", "attention.sliding_window")
"""Keys of models that are computed in another way. Their configs are left to transformers."""
CONTROL, USER_DEFINED = 3, 4
"""Types of tokens that are matched as a whole in texts. Control tokens are also left out of answers."""
SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
"""Names in tokenizer_config.json, and the keys with their ids."""
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = dict.fromkeys(("llama3", "llama-v3", "llama-bpe"), _SPLIT % "{1,3}") | {"qwen2": _SPLIT % ""}
"""Expressions that divide a text before byte-pair encoding, by `tokenizer.ggml.pre`."""
_PLAIN = (None, "default", "gpt-2", "gpt2")
"""Values of `tokenizer.ggml.pre` for GPT-2's own division."""
SAMPLING = {
    "temperature": ("general.sampling.temp", 0.8),
    "top_k": ("general.sampling.top_k", 40),
    "top_p": ("general.sampling.top_p", 0.95),
    "min_p": ("general.sampling.min_p", 0.05),
    "repetition_penalty": ("general.sampling.penalty_repeat", 1.0),
}
"""Fields of generation_config.json: the key in the file, and llama.cpp's default."""


def config_json(parsed: GgufFile) -> dict[str, object] | None:
    """Return the content of config.json for the model in a GGUF file, or None if only transformers can derive it."""
    family, metadata = parsed.architecture, parsed.metadata
    tensors = parsed.tensors
    if family not in CLASSES or "token_embd.weight" not in tensors:
        return None
    if any(metadata.get(f"{family}.{key}") not in (None, 0, "none") for key in OTHER_ROTATION):
        return None
    values = {
        "hidden_size": metadata.get(f"{family}.embedding_length"),
        "intermediate_size": metadata.get(f"{family}.feed_forward_length"),
        "num_hidden_layers": metadata.get(f"{family}.block_count"),
        "num_attention_heads": metadata.get(f"{family}.attention.head_count"),
        "max_position_embeddings": metadata.get(f"{family}.context_length"),
        "rms_norm_eps": metadata.get(f"{family}.attention.layer_norm_rms_epsilon"),
    }
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    if not all(isinstance(value, int | float) and value > 0 for value in values.values()):
        return None
    assert isinstance(heads, int) and isinstance(hidden, int)
    head_dim = metadata.get(f"{family}.attention.key_length") or metadata.get(f"{family}.rope.dimension_count")
    if family == "qwen3" and head_dim is None:
        return None
    values |= {
        "architectures": [CLASSES[family]],
        "model_type": family,
        "dtype": DTYPE,
        "hidden_act": "silu",
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "num_key_value_heads": metadata.get(f"{family}.attention.head_count_kv") or heads,
        "head_dim": head_dim or hidden // heads,
        "rope_parameters": {
            "rope_theta": metadata.get(f"{family}.rope.freq_base") or DEFAULT_ROPE_THETA,
            "rope_type": "default",
        },
        # llama.cpp stores the head only if it is not the embedding.
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _ends(metadata),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return values | _family_fields(family, parsed)


def _family_fields(family: str, parsed: GgufFile) -> dict[str, object]:
    """Return the fields of config.json that only models of llama.cpp's architecture `family` have."""
    if family == "llama":
        return {
            "attention_bias": "blk.0.attn_q.bias" in parsed.tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in parsed.tensors,
        }
    windows: dict[str, object] = {"use_sliding_window": False, "sliding_window": None}
    return windows if family == "qwen2" else {**windows, "attention_bias": "blk.0.attn_q.bias" in parsed.tensors}


def _ends(metadata: dict[str, object]) -> object:
    """Return the ids of the tokens that end an answer, as config.json states them: a number, a list, or None. Chat
    models may state the end of a turn separately."""
    found = [metadata.get(f"tokenizer.ggml.{key}") for key in ("eos_token_id", "eot_token_id")]
    stated = list(dict.fromkeys(token for token in found if token is not None))
    return stated if len(stated) > 1 else stated[0] if stated else None


def generation_config(parsed: GgufFile) -> dict[str, object]:
    """Return the content of generation_config.json: the sampling parameters that the GGUF file states, and llama.cpp's
    defaults for the others."""
    stated = {name: parsed.metadata.get(key, default) for name, (key, default) in SAMPLING.items()}
    values = {name: value if isinstance(value, int | float) else SAMPLING[name][1] for name, value in stated.items()}
    return {"do_sample": True, **values, "eos_token_id": _ends(parsed.metadata)}


def special_tokens(parsed: GgufFile) -> dict[str, str]:
    """Return the special tokens of a GGUF file by their names in tokenizer_config.json, such as `bos_token`."""
    tokens = parsed.metadata.get("tokenizer.ggml.tokens")
    assert isinstance(tokens, list)
    ids = {name: parsed.metadata.get(f"tokenizer.ggml.{key}") for name, key in SPECIAL_TOKENS.items()}
    return {name: tokens[number] for name, number in ids.items() if isinstance(number, int) and number < len(tokens)}


def tokenizer_of(parsed: GgufFile) -> Tokenizer | None:
    """Return the tokenizer that a GGUF file describes, if it is a byte-level one of a known kind; None if only
    transformers can derive it."""
    metadata = parsed.metadata
    tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
    division = _division(metadata.get("tokenizer.ggml.pre"))
    if metadata.get("tokenizer.ggml.model") != "gpt2" or division is None:
        return None
    if not isinstance(tokens, list) or not isinstance(merges, list):
        return None
    spelling, alphabet = _byte_spelling(), set(_byte_spelling().values())
    vocab = {
        token if alphabet.issuperset(token) else "".join(spelling[byte] for byte in token.encode()): number
        for number, token in enumerate(tokens)
    }
    pairs = [(left, right) for left, _, right in (str(merge).partition(" ") for merge in merges)]
    made = Tokenizer(models.BPE(vocab=vocab, merges=pairs, continuing_subword_prefix="", end_of_word_suffix=""))
    made.pre_tokenizer = division
    made.decoder = decoders.ByteLevel()
    _add_tokens(made, parsed, alphabet)
    return made


def _add_tokens(made: Tokenizer, parsed: GgufFile, alphabet: set[str]) -> None:
    """Add the control tokens and the user-defined tokens of a GGUF file to the tokenizer `made`, so that they are never
    split. `alphabet` are the characters that spell bytes."""
    tokens, types = parsed.metadata["tokenizer.ggml.tokens"], parsed.metadata.get("tokenizer.ggml.token_type")
    assert isinstance(tokens, list)
    pairs = list(zip(tokens, types, strict=False)) if isinstance(types, list) else []
    # In a byte-level vocabulary all tokens are spelled in its alphabet; others are marked wrongly.
    control = [token for token, kind in pairs if kind == CONTROL and alphabet.issuperset(token)]
    named = [token for token in special_tokens(parsed).values() if token not in control]
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in [*control, *named]])
    users = [token for token, kind in pairs if kind == USER_DEFINED and made.token_to_id(token) is not None]
    made.add_tokens([AddedToken(token, normalized=False, special=False) for token in users])


def _division(pre: object) -> pre_tokenizers.PreTokenizer | None:
    """Return the rule by which a text is divided before byte-pair encoding, for the name `pre` of the rule in a GGUF
    file; None if the name is not known here."""
    if pre in _PLAIN:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if (split := _SPLITS.get(str(pre))) is None:
        return None
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


@cache
def _byte_spelling() -> dict[int, str]:
    """Return the character by which GPT-2's vocabulary spells each byte: printable characters stand for themselves,
    other bytes are spelled from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}

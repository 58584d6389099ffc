"""Tiny tokenizers of every kind, written as Hugging Face folders."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


def byte_level() -> Tokenizer:
    """Ids 0..255 are the bytes, then a few merges, then special tokens. So letters have their ASCII codes."""
    alphabet = _bytes_to_chars()
    vocab = {alphabet[value]: value for value in range(256)}
    merges = []
    for left, right in [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ã", "©")]:
        merges.append((left, right))
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2: pieces with ▁ for a space, and a token for each byte for everything else."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    pieces += ["▁", "a", "b", "h", "e", "l", "o", "▁h", "▁a", "he", "ll", "▁hello", "é"]
    merges = [("▁", "h"), ("▁", "a"), ("h", "e"), ("l", "l")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def word_piece() -> Tokenizer:
    pieces = ["[UNK]", "[CLS]", "[SEP]", "hello", "wor", "##ld", "a", "##b", ",", "!"]
    tokenizer = Tokenizer(models.WordPiece(vocab={p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("[CLS]", "[SEP]")])
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer | None = None, **config: object) -> Path:
    """A model's folder as far as a router needs it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer or byte_level()
    tokenizer.save(str(folder / "tokenizer.json"))
    stated: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(stated | config))
    (folder / "config.json").write_text(json.dumps({"vocab_size": tokenizer.get_vocab_size()}))
    return folder


def _bytes_to_chars() -> dict[int, str]:
    from tokenizers.pre_tokenizers import ByteLevel

    table: dict[int, str] = {}
    pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    for code in [*range(0x80), *range(0x80, 0x800)]:
        encoded = chr(code).encode()
        ((text, _),) = pre_tokenizer.pre_tokenize_str(chr(code))
        table |= dict(zip(encoded, text, strict=True))
    missing = iter(sorted(set(ByteLevel.alphabet()) - set(table.values())))
    return {value: table[value] if value in table else next(missing) for value in range(256)}

"""Write model folders without weights that a whole cluster can serve: the config of a shape, and a generated
vocabulary.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from baton_serve.bench.micro.engine_shapes import SHAPES, write_shape
from baton_serve.bench.micro.media_shapes import write_media_shape

END = "<|end|>"
_IMAGE_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
"""Texts of the special tokens whose IDs config.json has."""
_IMAGE_CHAT = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
"""A chat template in which each image stands at its place among the texts."""


def write_servable_shape(name: str, folder: Path) -> Path:
    """Write config and tokenizer for `--load-format dummy` and return the folder. Every token except the end token
    decodes to text, so that each one appears in the stream."""
    write_shape(name, folder)
    size = SHAPES[name]["vocab_size"]
    assert isinstance(size, int)
    _write_tokenizer(folder, size, {size - 1: END})
    return folder


def write_servable_images(folder: Path, *, is_small: bool) -> Path:
    """Write the same for Qwen2.5-VL 7B, or a tiny model with the same parts, with a chat template that places images,
    and return the folder."""
    write_media_shape("images", folder, is_small=is_small)
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    specials = {config[name]: token for name, token in _IMAGE_TOKENS.items()} | {text["eos_token_id"]: END}
    _write_tokenizer(folder, text["vocab_size"], specials, chat_template=_IMAGE_CHAT)
    return folder


def _write_tokenizer(folder: Path, size: int, specials: Mapping[int, str], **settings: str) -> None:
    """Write a vocabulary of `size` tokens with these special ones by ID, of which one is `END`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: number for number, symbol in enumerate(alphabet)}
    vocab |= {specials.get(number, f"Ġt{number}"): number for number in range(len(vocab), size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([specials[number] for number in sorted(specials)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

"""Write a model folder without weights that a whole cluster can serve: the config of a shape, and a generated
vocabulary.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from baton_serve.bench.micro.engine_shapes import SHAPES, write_shape

END = "<|end|>"


def write_servable_shape(name: str, folder: Path) -> Path:
    """Write config and tokenizer for `--load-format dummy` and return the folder. Every token except the end token
    decodes to text, so that each one appears in the stream."""
    write_shape(name, folder)
    size = SHAPES[name]["vocab_size"]
    assert isinstance(size, int)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: number for number, symbol in enumerate(alphabet)}
    vocab |= {f"Ġt{number}": number for number in range(len(vocab), size - 1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder

"""Makes a folder in Hugging Face format from a single GGUF file: config, tokenizer and chat template.

transformers derives them from the file's metadata. The weights stay in the file; the folder has a link to it.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from baton_serve.engine.errors import ModelError
from baton_serve.engine.loading.gguf import GGUF_ERRORS
from baton_serve.engine.model_folder import first_line

DTYPE = "bfloat16"
"""Dtype in which such a model computes by default; `--dtype` overrides it. The file has weights of several types."""


def unpack(file: Path, folder: Path) -> Path:
    """Make or update `folder`, and return its link to the file, which can be given as MODEL. Raises `ModelError`."""
    if not file.is_file():
        raise ModelError(f"{file} is not a file")
    try:
        config: Any = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
        tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
        adds_bos = _adds_bos(file)
    except GGUF_ERRORS as exc:
        raise ModelError(f"{file} cannot be unpacked: {first_line(exc)}") from exc
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(f"{file} has a model of type {config.model_type}, which cannot generate text")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    # transformers does not carry this rule over from the metadata.
    if adds_bos and tokenizer.bos_token is not None:
        _add_bos(folder / "tokenizer.json", tokenizer.bos_token)
    stated = {**config.to_dict(), "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]}
    stated |= {"dtype": DTYPE}
    (folder / "config.json").write_text(json.dumps(stated, indent=2, default=str) + "\n")
    link = folder / file.name
    # The folder may exist, with a link to a file that has moved.
    link.unlink(missing_ok=True)
    link.symlink_to(file.resolve())
    return link


def _adds_bos(file: Path) -> bool:
    """Return whether texts begin with the BOS token: as the file says, or as llama.cpp does it for SentencePiece."""
    import gguf

    fields = gguf.GGUFReader(file).fields
    if (stated := fields.get("tokenizer.ggml.add_bos_token")) is not None:
        return bool(stated.contents())
    kind = fields.get("tokenizer.ggml.model")
    return kind is not None and kind.contents() == "llama"


def _add_bos(path: Path, token: str) -> None:
    """Let a tokenizer put the token before each text, unless it does so already."""
    tokenizer = Tokenizer.from_file(str(path))
    number = tokenizer.token_to_id(token)
    # The tokenizer adds it already.
    if number is None or tokenizer.encode("a").ids[0] == number:
        return
    tokenizer.post_processor = TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token}:1 $B:1", special_tokens=[(token, number)]
    )
    tokenizer.save(str(path))

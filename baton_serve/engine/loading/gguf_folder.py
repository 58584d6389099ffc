"""Unpacks a single GGUF file to a model folder: config, tokenizer and chat template, by `gguf_metadata.py` or by
transformers.

They are derived from the file's metadata, for architectures and tokenizers that are not known here by transformers. The
weights stay in the file; the folder has a link to it.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from baton_serve.contracts.model_path import gguf_cache_folder, gguf_parts
from baton_serve.engine.errors import ModelError
from baton_serve.engine.loading.gguf_header import GgufFile, GgufFormatError, read_gguf
from baton_serve.engine.loading.gguf_metadata import DTYPE, config_json, generation_config, special_tokens, tokenizer_of
from baton_serve.engine.model_folder import GGUF_ERRORS, first_line


def unpack_to_cache(file: Path, environ: Mapping[str, str]) -> Path:
    """Make a model folder with config and tokenizer for a lone GGUF file, in this user's cache. Return the path in it
    to serve instead of the file. Raises `ModelError` if the file is broken or cannot generate text."""
    return unpack(file, gguf_cache_folder(file, environ))


def unpack(file: Path, folder: Path) -> Path:
    """Create or update the model folder `folder` with the config and tokenizer that a GGUF file contains, and a link to
    the file. Return the link, the path to serve as MODEL. Raises `ModelError` if the file is broken or cannot generate
    text."""
    if not file.is_file():
        raise ModelError(f"{file} is not a file")
    folder.mkdir(parents=True, exist_ok=True)
    # Files are renamed into the folder, because another process may unpack the same file or read the folder.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unpack-") as name:
        made = Path(name)
        try:
            parsed = read_gguf(file)
            _write(file, parsed, made)
        except GgufFormatError as exc:
            raise ModelError(f"{file} cannot be unpacked: {exc}") from exc
        except GGUF_ERRORS as exc:
            raise ModelError(f"{file} cannot be unpacked: {first_line(exc)}") from exc
        for part in gguf_parts(file):
            (made / part.name).symlink_to(part.resolve())
        for path in sorted(made.iterdir()):
            path.replace(folder / path.name)
    return folder / file.name


def _write(file: Path, parsed: GgufFile, folder: Path) -> None:
    """Write all files of the model folder, except the link to the GGUF file. Raises `ModelError` for a model that
    cannot generate text."""
    config, tokenizer = config_json(parsed), tokenizer_of(parsed)
    if config is None:
        config = _config_of_transformers(file)
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation_config(parsed), indent=2) + "\n")
    if tokenizer is None:
        bos = _save_tokenizer_of_transformers(file, folder)
    else:
        bos = _save_tokenizer(parsed, tokenizer, folder)
    if bos is not None and _adds_bos(parsed.metadata):
        _add_bos(folder / "tokenizer.json", bos)


def _save_tokenizer(parsed: GgufFile, tokenizer: Tokenizer, folder: Path) -> str | None:
    """Write the tokenizer of a GGUF file and its chat template to `folder`. Return its BOS token, or None if it has
    none."""
    tokens = special_tokens(parsed)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    stated = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated, indent=2) + "\n")
    if isinstance(template := parsed.metadata.get("tokenizer.chat_template"), str):
        (folder / "chat_template.jinja").write_text(template)
    return tokens.get("bos_token")


def _config_of_transformers(file: Path) -> dict[str, object]:
    """Return the content of config.json as transformers derives it from a GGUF file, which takes seconds. Raises
    `ModelError` for a model that cannot generate text."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config: Any = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(f"{file} has a model of type {config.model_type}, which cannot generate text")
    architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    return {**config.to_dict(), "architectures": architectures, "dtype": DTYPE}


def _save_tokenizer_of_transformers(file: Path, folder: Path) -> str | None:
    """Write the tokenizer as transformers derives it from a GGUF file, which takes seconds. Return its BOS token, or
    None if it has none."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    tokenizer.save_pretrained(folder)
    return None if tokenizer.bos_token is None else str(tokenizer.bos_token)


def _adds_bos(metadata: Mapping[str, object]) -> bool:
    """Return whether a GGUF file wants the BOS token before each text. If it does not say so, it wants it for
    SentencePiece vocabularies, as in llama.cpp."""
    stated = metadata.get("tokenizer.ggml.add_bos_token")
    return metadata.get("tokenizer.ggml.model") == "llama" if stated is None else bool(stated)


def _add_bos(path: Path, token: str) -> None:
    """Change the tokenizer.json at `path` so that it puts the BOS token `token` before each text, unless it does so
    already."""
    tokenizer = Tokenizer.from_file(str(path))
    number = tokenizer.token_to_id(token)
    # The tokenizer adds it already.
    if number is None or tokenizer.encode("a").ids[0] == number:
        return
    tokenizer.post_processor = TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token}:1 $B:1", special_tokens=[(token, number)]
    )
    tokenizer.save(str(path), pretty=False)

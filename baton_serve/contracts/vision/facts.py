"""The JSON files of a model's folder from which its family is made."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec


class ModelFacts(msgspec.Struct, frozen=True):
    """The contents of those files of a model folder that say how the model reads images. A missing file is empty."""

    config: Mapping[str, Any] = {}
    """The contents of config.json."""
    processor: Mapping[str, Any] = {}
    """processor_config.json: the processor of texts and images together."""
    images: Mapping[str, Any] = {}
    """The image processor: preprocessor_config.json, or a part of processor_config.json in newer folders."""
    tokenizer: Mapping[str, Any] = {}
    """The contents of tokenizer_config.json."""

    @classmethod
    def of(cls, folder: Path) -> "ModelFacts":
        """Read the files of this model folder. A broken file counts as empty: loading the model reports what is
        wrong."""
        processor = _read(folder / "processor_config.json")
        nested = processor.get("image_processor")
        # transformers prefers the nested settings too, in folders that have both.
        images = nested if isinstance(nested, dict) else _read(folder / "preprocessor_config.json")
        return cls(_read(folder / "config.json"), processor, images, _read(folder / "tokenizer_config.json"))


def _read(file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return {}

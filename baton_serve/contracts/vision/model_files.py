"""Reads the JSON files of a model's folder from which its image family is made."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
"""Keys of `size` by the older names of the same limits."""


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
    videos: Mapping[str, Any] = {}
    """The video processor: video_preprocessor_config.json, or a part of processor_config.json; else `images`."""
    sounds: Mapping[str, Any] = {}
    """The extractor of audio features: preprocessor_config.json, or a part of processor_config.json in newer folders;
    empty if there is none."""
    settings: Mapping[str, Any] = {}
    """Settings of images that replace those of the folder (`mm_processor_kwargs`); they are in `images` too."""

    @classmethod
    def of(cls, folder: Path) -> "ModelFacts":
        """Read the files of this model folder. A broken file counts as empty: loading the model reports what is
        wrong."""
        processor = _read(folder / "processor_config.json")
        nested = processor.get("image_processor")
        # transformers prefers the nested settings too, in folders that have both.
        images = nested if isinstance(nested, dict) else _read(folder / "preprocessor_config.json")
        clips = processor.get("video_processor")
        videos = clips if isinstance(clips, dict) else _read(folder / "video_preprocessor_config.json")
        config = _read(folder / "config.json")
        thinker = config.get("thinker_config")
        return cls(
            # An Omni model's thinker hears, sees and writes. The other parts only speak.
            thinker if isinstance(thinker, dict) else config,
            processor,
            images,
            _read(folder / "tokenizer_config.json"),
            # As in transformers, older folders have one file for both.
            videos or _read(folder / "preprocessor_config.json"),
            _sounds(processor.get("feature_extractor"), folder),
        )

    def with_settings(self, images: Mapping[str, Any], videos: Mapping[str, Any]) -> "ModelFacts":
        """Return these facts with some settings of the two processors replaced."""
        return msgspec.structs.replace(
            self, images=_replaced(self.images, images), videos=_replaced(self.videos, videos), settings=images
        )

    def token_text(self, name: str) -> str:
        """Return the text of a special token that tokenizer_config.json names, such as `bos_token`; empty if it names
        none."""
        stated = self.tokenizer.get(name)
        found = stated.get("content") if isinstance(stated, Mapping) else stated
        return found if isinstance(found, str) else ""


def _sounds(nested: object, folder: Path) -> Mapping[str, Any]:
    if isinstance(nested, dict):
        return nested
    stated = _read(folder / "preprocessor_config.json")
    # The file of a model without audio describes its images alone.
    return stated if "feature_extractor_type" in stated else {}


def _replaced(stated: Mapping[str, Any], settings: Mapping[str, Any]) -> Mapping[str, Any]:
    found = {**stated, **settings}
    if isinstance(size := settings.get("size"), Mapping):
        # A size states some edges and leaves the others. Older names of the same limits would hide it.
        older = {edge: found.pop(name) for name, edge in EDGES.items() if found.get(name) is not None}
        found["size"] = {**(stated.get("size") or {}), **older, **size}
    return found


def _read(file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return {}

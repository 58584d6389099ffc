"""The decoder of a model with towers for images or sound, as a model of its own.

Of LLaVA, instances without images load only this; of all other multimodal models, every instance, which serves text.
"""

import json
import re
from pathlib import Path
from typing import TypeVar

from baton_serve.contracts.vision import ImageFamily, image_family
from baton_serve.contracts.vision.facts import ModelFacts
from baton_serve.engine.model_folder import HfConfig

T = TypeVar("T")

_NESTED = re.compile(r"^(model\.)?(language_model|text_model)\.")
"""Names of the decoder's tensors beside towers, in all layouts that transformers has written."""
_TOWER = re.compile(r"^(model\.)?(visual|vision_tower|vision_model|multi_modal_projector|audio_tower)\.")
"""Names of a tower's tensors in checkpoints whose decoder has the names of a plain one, such as Qwen2-VL."""


def family_of(folder: Path) -> ImageFamily | None:
    """Return how a model reads images; None if it has no vision tower that is supported."""
    return image_family(ModelFacts.of(folder))


def decoder_config(hf_config: HfConfig) -> HfConfig:
    """Return the config of the decoder alone; of a model without towers, its config."""
    text = hf_config.get_text_config()
    if text is hf_config or getattr(hf_config, "is_encoder_decoder", False):
        return hf_config
    text.architectures = [f"{_family_of(text)}ForCausalLM"]
    if getattr(text, "dtype", None) is None:
        text.dtype = getattr(hf_config, "dtype", None)
    if getattr(text, "quantization_config", None) is None and hasattr(hf_config, "quantization_config"):
        text.quantization_config = hf_config.quantization_config
    # Which of the two configs counts has changed between versions of transformers.
    text.tie_word_embeddings = any(getattr(part, "tie_word_embeddings", False) for part in (text, hf_config))
    return text


def _family_of(text: HfConfig) -> str:
    """Return the name of a text model's family, which its classes in transformers begin with."""
    return type(text).__name__.removesuffix("Config").removesuffix("Text")


def holds_more(folder: Path, decoder: HfConfig) -> bool:
    """Return whether the model in a folder has parts beside the decoder with this config of `decoder_config`."""
    try:
        stated = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False  # loading the decoder reports what is wrong
    return bool(stated.get("model_type") != decoder.model_type)


def decoder_tensors(stored: dict[str, T]) -> dict[str, T]:
    """Return the decoder's tensors under the names of a plain decoder; of a model without towers, all tensors as they
    are.
    """
    if not any(_NESTED.match(name) for name in stored):
        return {name: tensor for name, tensor in stored.items() if not _TOWER.match(name)}
    named = ((_own_name(name), tensor) for name, tensor in stored.items())
    return {name: tensor for name, tensor in named if name is not None}


def _own_name(name: str) -> str | None:
    """Return a tensor's name in a plain decoder; None for one of another part of the model."""
    match = _NESTED.match(name)
    if match is None:
        return name if name.startswith("lm_head.") else None
    rest = name[match.end() :]
    return rest if rest.startswith(("lm_head.", "model.")) else f"model.{rest}"

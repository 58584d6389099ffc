"""Decides the config and the tensors of a multimodal model's text part, so that it is loaded as a decoder of
its own.

Of LLaVA, instances without images load only this; of all other multimodal models, every instance, which serves text.
"""

import json
import re
from pathlib import Path
from typing import TypeVar

from baton_serve.contracts.vision import ImageFamily, image_family
from baton_serve.contracts.vision.model_files import ModelFacts
from baton_serve.engine.model_folder import HfConfig

T = TypeVar("T")

_NESTED = re.compile(r"^(model\.)?(language_model|text_model)\.")
"""Names of the decoder's tensors beside towers, in all layouts that transformers has written."""
BIDIRECTIONAL_TYPES = frozenset({"paligemma"})
"""Types of models in whose prompts all tokens, of images and text, attend to each other in both directions."""
_BIDIRECTIONAL_MARK = "has_bidirectional_prompts"
"""Attribute of a decoder's config that says so. It is none of transformers'."""
_THINKER = "thinker."
"""Begins the names of the part of an Omni model that hears, sees and writes. All other parts speak."""
_TOWER = re.compile(r"^(model\.)?(visual|vision_tower|vision_model|multi_modal_projector|audio_tower)\.")
"""Names of a tower's tensors in checkpoints whose decoder has the names of a plain one, such as Qwen2-VL."""


def family_of(folder: Path) -> ImageFamily | None:
    """Return how the model in a folder reads images; None if it has no vision tower, or one that is not supported."""
    return image_family(ModelFacts.of(folder))


def decoder_config(hf_config: HfConfig) -> HfConfig:
    """Return the config of a multimodal model's text decoder, as if it were a model by itself; for a text model, its
    own config.
    """
    text = hf_config.get_text_config()
    if text is hf_config or getattr(hf_config, "is_encoder_decoder", False):
        return hf_config
    text.architectures = [f"{_family_of(text)}ForCausalLM"]
    if hf_config.model_type in BIDIRECTIONAL_TYPES:
        # Answers are causal. A decoder that says True here, by itself, is an encoder.
        text.use_bidirectional_attention = False
        setattr(text, _BIDIRECTIONAL_MARK, True)
    if getattr(text, "dtype", None) is None:
        text.dtype = getattr(hf_config, "dtype", None)
    if getattr(text, "quantization_config", None) is None and hasattr(hf_config, "quantization_config"):
        text.quantization_config = hf_config.quantization_config
    # Which of the two configs counts has changed between versions of transformers.
    text.tie_word_embeddings = any(getattr(part, "tie_word_embeddings", False) for part in (text, hf_config))
    return text


def has_bidirectional_prompts(decoder: HfConfig) -> bool:
    """Return whether all tokens of a prompt attend to each other in both directions. `decoder` is what `decoder_config`
    has returned."""
    return bool(getattr(decoder, _BIDIRECTIONAL_MARK, False))


def _family_of(text: HfConfig) -> str:
    """Return the name with which the transformers classes of a text model begin, such as "Qwen2" in
    Qwen2ForCausalLM.
    """
    return type(text).__name__.removesuffix("Config").removesuffix("Text")


def holds_more(folder: Path, decoder: HfConfig) -> bool:
    """Return whether the model in a folder has more parts than its text decoder, such as a vision tower. `decoder` is
    what `decoder_config` has returned for it.
    """
    try:
        stated = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False  # loading the decoder reports what is wrong
    return bool(stated.get("model_type") != decoder.model_type)


def decoder_tensors(stored: dict[str, T]) -> dict[str, T]:
    """Return the tensors of a multimodal checkpoint that belong to its text decoder, by the names that they have in a
    text model. For the checkpoint of a text model, return all tensors.
    """
    if any(name.startswith(_THINKER) for name in stored):
        inside = {name: tensor for name, tensor in stored.items() if name.startswith(_THINKER)}
        return decoder_tensors({name.removeprefix(_THINKER): tensor for name, tensor in inside.items()})
    if not any(_NESTED.match(name) for name in stored):
        return {name: tensor for name, tensor in stored.items() if not _TOWER.match(name)}
    named = ((_own_name(name), tensor) for name, tensor in stored.items())
    return {name: tensor for name, tensor in named if name is not None}


def _own_name(name: str) -> str | None:
    """Return the name that a tensor of a multimodal checkpoint has in a text model; None if it belongs to another part,
    such as the vision tower.
    """
    match = _NESTED.match(name)
    if match is None:
        return name if name.startswith("lm_head.") else None
    rest = name[match.end() :]
    return rest if rest.startswith(("lm_head.", "model.")) else f"model.{rest}"

"""The decoder of a model that reads images, by itself: all that writes answers, and all that most instances load."""

import json
import re
from pathlib import Path
from typing import TypeVar

from baton_serve.contracts.vision import MODEL_TYPES, SERVED, TEXT_TYPES, VisionProfile, vision_profile
from baton_serve.engine.errors import UnsupportedModelError
from baton_serve.engine.model_folder import HfConfig

T = TypeVar("T")

_CLASSES = {kind: f"{kind.capitalize()}ForCausalLM" for kind in TEXT_TYPES}

_DECODER = re.compile(r"^(model\.)?language_model\.(model\.)?(?=layers\.|embed_tokens\.|norm\.)")
_HEAD = re.compile(r"^language_model\.(?=lm_head\.)")
_OTHERS = re.compile(r"^(model\.|language_model\.)?(vision_tower\.|multi_modal_projector\.|image_newline$)")


def profile_of(folder: Path) -> VisionProfile | None:
    try:
        return vision_profile(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError):
        return None  # whoever loads the decoder says what is wrong


def reads_images(folder: Path) -> bool:
    return profile_of(folder) is not None


def decoder_config(hf_config: HfConfig) -> HfConfig:
    """Of the decoder alone, where the model reads images. Raises `UnsupportedModelError` for a kind not known here."""
    if hf_config.model_type not in MODEL_TYPES:
        return hf_config
    if vision_profile(hf_config.to_dict()) is None:
        tower, text = hf_config.vision_config.model_type, hf_config.text_config.model_type
        raise UnsupportedModelError(
            f"{hf_config.model_type} with a tower of type {tower} before {text} cannot be served; {SERVED}"
        )
    text = hf_config.text_config
    text.architectures = [_CLASSES[text.model_type]]
    if getattr(text, "dtype", None) is None:
        text.dtype = getattr(hf_config, "dtype", None)
    text.tie_word_embeddings = bool(text.tie_word_embeddings or hf_config.tie_word_embeddings)
    return text


def decoder_tensors(stored: dict[str, T]) -> dict[str, T]:
    """What a checkpoint's files hold of the decoder, under the names that it has by itself. Of a model without a tower:
    all, as it is."""
    if not any(_OTHERS.match(name) for name in stored):
        return stored
    return {_own_name(name): tensor for name, tensor in stored.items() if not _OTHERS.match(name)}


def _own_name(name: str) -> str:
    return _HEAD.sub("", _DECODER.sub("model.", name))

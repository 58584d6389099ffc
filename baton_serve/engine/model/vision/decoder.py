"""The decoder of a model with a vision tower, as a model of its own. Instances without images load only this."""

import json
import re
from pathlib import Path
from typing import TypeVar

from baton_serve.contracts.vision import MODEL_TYPES, SERVED, TEXT_TYPES, VisionProfile, vision_profile
from baton_serve.engine.errors import UnsupportedModelError
from baton_serve.engine.model_folder import HfConfig

T = TypeVar("T")

_CLASSES = {kind: f"{kind.capitalize()}ForCausalLM" for kind in TEXT_TYPES}
"""Class of the decoder, by the type of the text model."""

_DECODER = re.compile(r"^(model\.)?language_model\.(model\.)?(?=layers\.|embed_tokens\.|norm\.)")
"""Names of the decoder's tensors in all layouts that transformers has written."""
_HEAD = re.compile(r"^language_model\.(?=lm_head\.)")
_OTHERS = re.compile(r"^(model\.|language_model\.)?(vision_tower\.|multi_modal_projector\.|image_newline$)")
"""Names of tensors that do not belong to the decoder."""


def profile_of(folder: Path) -> VisionProfile | None:
    """Return how a model reads images; None if it has no vision tower or its config cannot be read."""
    try:
        return vision_profile(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError):
        return None  # loading the decoder reports what is wrong


def reads_images(folder: Path) -> bool:
    """Return whether the model in a folder has a vision tower that is supported."""
    return profile_of(folder) is not None


def decoder_config(hf_config: HfConfig) -> HfConfig:
    """Return the config of the decoder alone; of a model without tower, its config.

    Raises `UnsupportedModelError` for an unsupported combination of tower and decoder.
    """
    if hf_config.model_type not in MODEL_TYPES:
        return hf_config
    if vision_profile(hf_config.to_dict()) is None:
        tower, text = hf_config.vision_config.model_type, hf_config.text_config.model_type
        raise UnsupportedModelError(
            f"{hf_config.model_type} with a vision tower of type {tower} and a decoder of type {text} cannot be served;"
            f" {SERVED}"
        )
    text = hf_config.text_config
    text.architectures = [_CLASSES[text.model_type]]
    if getattr(text, "dtype", None) is None:
        text.dtype = getattr(hf_config, "dtype", None)
    text.tie_word_embeddings = bool(text.tie_word_embeddings or hf_config.tie_word_embeddings)
    return text


def decoder_tensors(stored: dict[str, T]) -> dict[str, T]:
    """Return the decoder's tensors under the names of a plain decoder; of a model without tower, all tensors as they
    are.
    """
    if not any(_OTHERS.match(name) for name in stored):
        return stored
    return {_own_name(name): tensor for name, tensor in stored.items() if not _OTHERS.match(name)}


def _own_name(name: str) -> str:
    """Return a tensor's name in a plain decoder."""
    return _HEAD.sub("", _DECODER.sub("model.", name))

"""Speech recognition: files to features (`audio_reader`), features to the encoder's output (`encoder`), the decoder's
layers with cross-attention (`decoder`), and the sources that a step has to encode (`prompt_audio`).

Instances that compute no prompts load only the decoder, and encode instances only the encoder.
"""

from typing import TYPE_CHECKING

import torch

from baton_serve.contracts.model_path import model_folder
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.model.loaded_model import LoadedModel
from baton_serve.engine.model.speech.decoder import cross_port
from baton_serve.engine.model.speech.prompt_audio import PromptAudio
from baton_serve.engine.model_folder import read_config

if TYPE_CHECKING:
    from baton_serve.engine.model.speech.encoder import WindowEncoder

__all__ = ["load_audio", "load_window_encoder"]


def load_audio(config: EngineConfig, model: LoadedModel, block_tokens: int, target: torch.device) -> PromptAudio | None:
    """Load the audio encoder of a model with cross-attention, such as Whisper, to the device `target`. Return None if
    the model has none, or if this instance computes no prompts with audio. With several ranks, only rank 0 loads it.

    Raises `ModelError` if it cannot be loaded.
    """
    if not model.source_tokens or not config.reads_images or not model.parts.is_first_rank:
        return None
    from baton_serve.engine.model.speech.encoder import load_encoder  # imports transformers, which takes seconds

    encoder = load_encoder(config, model_folder(config.model), target, model.dtype)
    return PromptAudio(encoder, block_tokens, model.source_tokens)


def load_window_encoder(config: EngineConfig, target: torch.device, dtype: torch.dtype) -> "WindowEncoder | None":
    """Load the audio encoder of a model with cross-attention to the device `target`, for an encode instance. Return
    None for other models. Raises `ModelError` if it cannot be loaded.
    """
    folder = model_folder(config.model)
    hf_config = read_config(folder, config)
    port = cross_port(hf_config)
    if port is None:
        return None
    from baton_serve.engine.model.speech.encoder import WindowEncoder, load_encoder

    return WindowEncoder(load_encoder(config, folder, target, dtype), port.source_tokens(hf_config))

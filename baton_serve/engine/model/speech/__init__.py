"""Speech recognition: files to features (`audio_reader`), features to the encoder's output (`encoder`), the decoder's
layers with cross-attention (`decoder`), and the sources that a step has to encode (`prompt`).

Instances that compute no prompts load only the decoder.
"""

import torch

from baton_serve.contracts.model_path import model_folder
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.model.loaded_model import LoadedModel
from baton_serve.engine.model.speech.prompt import PromptAudio

__all__ = ["load_audio"]


def load_audio(config: EngineConfig, model: LoadedModel, block_tokens: int, target: torch.device) -> PromptAudio | None:
    """Load the audio encoder of a model with cross-attention, such as Whisper, to the device `target`. Return None if
    the model has none, or if this instance computes no prompts with audio. With several ranks, only rank 0 loads it.

    Raises `ModelError` if it cannot be loaded.
    """
    if not model.source_tokens or not config.reads_images or model.parts.shard.rank:
        return None
    from baton_serve.engine.model.speech.encoder import load_encoder  # imports transformers, which takes seconds

    encoder = load_encoder(config, model_folder(config.model), target, model.dtype)
    return PromptAudio(encoder, block_tokens)

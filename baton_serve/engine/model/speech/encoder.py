"""Runs the audio encoder of a speech model by transformers: mel features to the states for cross-attention."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from baton_serve.contracts.block_layout import embedding_layout
from baton_serve.contracts.vision.model_files import ModelFacts
from baton_serve.engine import device as devices
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.errors import ModelError
from baton_serve.engine.model.fingerprint import encoder_fingerprint
from baton_serve.engine.model.speech.audio_reader import HFAudioReader
from baton_serve.engine.model.vision.image_types import DecodedImage
from baton_serve.engine.model_folder import (
    LOAD_ERRORS,
    first_line,
    is_pickled,
    quiet_transformers,
    read_config,
    weight_files,
    weights_error,
)

MAX_BATCH = 4
"""Number of windows that the encoder computes together. More would need memory that no step was measured with."""


class SpeechEncoder:
    """An audio encoder that is loaded on the device, with the feature extractor with which its model was trained."""

    def __init__(self, module: nn.Module, reader: HFAudioReader, device: torch.device) -> None:
        self.reader = reader
        self._module = module
        self.device = device
        self._dtype = reader.dtype = next(module.parameters()).dtype

    @torch.inference_mode()
    def encode(self, windows: list[Tensor]) -> list[Tensor]:
        """Encode windows of audio, given as mel features [mel bins, frames]. Return the encoder's output for each,
        [positions, hidden], without waiting for the device.
        """
        found: list[Tensor] = []
        for start in range(0, len(windows), MAX_BATCH):
            batch = torch.stack(windows[start : start + MAX_BATCH]).to(self._dtype)
            found += cast(Any, self._module)(devices.send(batch, self.device)).last_hidden_state.unbind(0)
        return found


class WindowEncoder:
    """Encodes windows of audio on an encode instance. Implements `engine.pooling.encode_engine.FileEncoder`: the rows
    of a window are the positions of the encoder's output.
    """

    max_batch = MAX_BATCH

    def __init__(self, encoder: SpeechEncoder, num_positions: int) -> None:
        """`num_positions` is the number of positions of the output for one window."""
        self.reader = encoder.reader
        self._encoder = encoder
        self._num_positions = num_positions

    def num_rows(self, picture: DecodedImage) -> int:
        """Return the number of rows of the encoder's output, which is the same for all windows."""
        return self._num_positions

    def encode_all(self, pictures: Sequence[DecodedImage]) -> list[Tensor]:
        """Encode windows, given by their mel features, together. Return [positions, hidden] for each without waiting
        for the device.
        """
        return self._encoder.encode([picture.inputs["input_features"] for picture in pictures])


def load_encoder(config: EngineConfig, folder: Path, target: torch.device, dtype: torch.dtype) -> SpeechEncoder:
    """Load the audio encoder of the model in a folder to the device `target`, and try it on silence. Raises
    `ModelError` if that fails.
    """
    reader = HFAudioReader(folder)
    module = _load(config, folder, dtype, target).to(target).eval().requires_grad_(False)
    encoder = SpeechEncoder(module, reader, target)
    try:
        # Found now, an extractor that does not fit the encoder fails no request.
        (states,) = encoder.encode([reader.silence()])
    except LOAD_ERRORS as exc:
        raise ModelError(f"the feature extractor in {folder} does not fit its encoder: {first_line(exc)}") from exc
    fingerprint = encoder_fingerprint(folder, config, [ModelFacts.of(folder).sounds], target.type)
    name = str(states.dtype).removeprefix("torch.")
    reader.embedding_layout = embedding_layout(fingerprint, width=states.shape[1], dtype=name)
    return encoder


def _load(config: EngineConfig, folder: Path, dtype: torch.dtype, target: torch.device) -> nn.Module:
    """Load the audio encoder of the model in a folder into host memory; random weights are drawn on `target`.
    transformers builds the encoder with a decoder, which gets no layers here.
    """
    import transformers

    # The config is shared with the decoder that was loaded before.
    alone = copy.deepcopy(read_config(folder, config))
    alone.decoder_layers = 0
    kind = cast(Any, transformers.AutoModel)
    try:
        if config.load_format == "dummy":
            # All instances with this seed must have the same encoder, because they exchange the KV of sources.
            torch.manual_seed(config.seed)
            with target:
                return cast(nn.Module, kind.from_config(alone, dtype=dtype).encoder)
        with quiet_transformers():
            module, report = kind.from_pretrained(
                folder,
                config=alone,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=not is_pickled(weight_files(folder, config.load_format, config.loader.pattern)),
                output_loading_info=True,
            )
    except LOAD_ERRORS as exc:
        raise weights_error(folder, exc) from exc
    # transformers fills missing weights with random numbers and only logs a warning.
    if missing := sorted(name for name in report["missing_keys"] if name.startswith("encoder.")):
        raise ModelError(f"{folder} lacks {len(missing)} weights of its encoder, such as {missing[0]}")
    return cast(nn.Module, module.encoder)

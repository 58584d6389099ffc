"""Turns the audio of chats into features by the model's own extractor, and features into embeddings by its encoder.

The reader can be called from any thread.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from baton_serve.audio_samples import Samples, read_wav, resampled
from baton_serve.contracts.vision import SoundRules
from baton_serve.engine.errors import ModelError, RequestError
from baton_serve.engine.model.vision.image_types import DecodedImage
from baton_serve.engine.model_folder import LOAD_ERRORS, first_line


class HFSoundReader:
    """Turns WAV files into spectra for a model that reads audio in chats, with the feature extractor of transformers.

    The router, or the offline API, has converted what clients give into such files.
    """

    def __init__(self, folder: Path, rules: SoundRules) -> None:
        """Load the feature extractor of the model in a folder. Raises `ModelError` if that fails."""
        import transformers  # takes seconds: only models with an encoder should pay them

        self._rules = rules
        try:
            self._extractor: Any = transformers.AutoFeatureExtractor.from_pretrained(folder, local_files_only=True)
        except LOAD_ERRORS as exc:
            raise ModelError(f"cannot load a feature extractor from {folder}: {first_line(exc)}") from exc

    def read(self, file: bytes | memoryview) -> DecodedImage:
        """Return the spectra of one WAV file, as inputs of the encoder in host memory. Raises `RequestError` for a file
        that cannot be read, is longer than the model hears, or is too short for it."""
        try:
            samples, rate = read_wav(file)
            longest = int(rate * self._rules.longest_s)
            if len(samples) > longest and self._rules.hears_all:
                raise ValueError(f"it is longer than {self._rules.longest_s:g} s")
            samples = samples[:longest]
            return self.sound_of(resampled(samples, rate, self._rules.rate_hz))
        except (*LOAD_ERRORS, MemoryError) as exc:
            raise RequestError("invalid", f"an audio cannot be read: {first_line(exc)}") from exc

    def sound_of(self, samples: Samples) -> DecodedImage:
        """Return the spectra of samples at the model's rate. Raises `UnfitImageError` if there are too few."""
        rules = self._rules
        text = rules.text_of(len(samples))
        found = self._extractor(samples, sampling_rate=rules.rate_hz, return_tensors="pt", **rules.call_settings)
        spectra: Tensor = found.input_features.to(torch.float32)
        mask = found.get("attention_mask")
        if mask is None:
            # Each window is a sample of a batch: [windows, bands, spectra of a window].
            windows = spectra[0].reshape(spectra.shape[1], -1, rules.window_samples // rules.hop)
            return DecodedImage({"input_features": windows.transpose(0, 1).contiguous()}, 0, 0, text)
        if not rules.is_filled:
            # Spectra of the silence behind the audio are not read, and a window may have 300 s of it.
            length = int(mask.sum())
            spectra, mask = spectra[:, :, :length].clone(), mask[:, :length]
        return DecodedImage({"input_features": spectra, "feature_attention_mask": mask}, 0, 0, text)


def encode_sound(module: nn.Module, inputs: Mapping[str, Tensor], count: int) -> Tensor:
    """Return the `count` embeddings [count, hidden] of one audio.

    `module` is a model of transformers without its decoder, and `inputs` are the spectra of `HFSoundReader` on its
    device.
    """
    whole = cast(Any, module)
    if not hasattr(whole, "get_audio_features"):
        return _qwen2_audio(whole, inputs["input_features"], inputs["feature_attention_mask"])[:count]
    output = whole.get_audio_features(**inputs)
    # Without a projector the encoder's output is what the decoder reads.
    found = getattr(output, "pooler_output", None)
    features = cast(Tensor, output.last_hidden_state if found is None else found)
    return features.flatten(0, -2)


def _qwen2_audio(whole: Any, spectra: Tensor, mask: Tensor) -> Tensor:
    """Return the embeddings of one audio, and behind them those of silence, by Qwen2-Audio, for which transformers has
    no function that only encodes.

    `spectra` are [1, bands, spectra of a window], and `mask` [1, spectra] has ones for those of the audio.
    """
    from transformers.masking_utils import create_bidirectional_mask  # newer versions of transformers have it

    seen, _ = whole.audio_tower._get_feat_extract_output_lengths(mask.sum(-1))
    # The first convolution halves the spectra; positions of the silence are not attended to.
    positions = torch.arange((spectra.shape[-1] - 2) // 2 + 1, device=spectra.device)
    shape = spectra.new_zeros((1, len(positions), 1))
    visible = (positions[None] < seen[:, None]).long()
    attention = create_bidirectional_mask(config=whole.audio_tower.config, inputs_embeds=shape, attention_mask=visible)
    hidden = whole.audio_tower(spectra, attention_mask=attention).last_hidden_state
    return cast(Tensor, whole.multi_modal_projector(hidden)[0])

"""Runs the vision tower and projector of a model by transformers: pixels to embeddings of the decoder's size."""

import copy
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from baton_serve.contracts.block_layout import embedding_layout
from baton_serve.contracts.media import Clip
from baton_serve.contracts.model_path import model_folder
from baton_serve.contracts.vision import ImageFamily, UnfitImageError, num_embeddings
from baton_serve.contracts.vision.model_files import ModelFacts
from baton_serve.engine import device as devices
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.errors import ModelError
from baton_serve.engine.model.fingerprint import encoder_fingerprint
from baton_serve.engine.model.speech.chat_audio import encode_sound
from baton_serve.engine.model.vision.image_reader import HFImageReader
from baton_serve.engine.model.vision.image_types import DecodedImage
from baton_serve.engine.model.vision.text_part import family_of
from baton_serve.engine.model.vision.window_attention import use_window_attention
from baton_serve.engine.model_folder import (
    LOAD_ERRORS,
    HfConfig,
    first_line,
    is_pickled,
    quiet_transformers,
    read_config,
    weight_files,
    weights_error,
)

_TRIED = ((64, 48), (48, 640), (1000, 900))
"""Widths and heights of images that are encoded at the start: small, tall, and large enough for several tiles."""
_STATED = ("vision_feature_layer", "vision_feature_select_strategy")
"""Arguments of towers whose values are in the model's config."""
_DECODERS = ("language_model.", "text_model.", "lm_head.")
"""Names of the decoder's parts of a model."""


class VisionTower:
    """A vision tower that is loaded on the device, with the model's image processor."""

    max_batch = 1
    """Number of files that an encode instance gives at once. Their sizes differ, so that each is computed by itself."""

    def __init__(self, module: nn.Module, family: ImageFamily, reader: HFImageReader, device: torch.device) -> None:
        self.family = family
        self.reader = reader
        self._module = module
        self._names = inspect.signature(getattr(module, "get_image_features", len)).parameters.keys()
        self._video_names = inspect.signature(getattr(module, "get_video_features", len)).parameters.keys()
        self._device = device
        self._dtype = next(module.parameters()).dtype
        reader.use_dtype(self._dtype)

    @torch.inference_mode()
    def encode(self, picture: DecodedImage) -> Tensor:
        """Encode one image, frames of a video, or an audio. Return [number of tokens, hidden] without waiting for the
        device.

        Features for the outputs of the decoder's first layers (DeepStack) follow in further columns.
        """
        module = cast(Any, self._module)
        if "input_features" in picture.inputs:
            assert picture.text is not None, "the text of an audio is known"
            spectra = {name: self.sent(value) for name, value in picture.inputs.items()}
            return encode_sound(self._module, spectra, num_embeddings(picture.text.parts))
        # Processors also return what only their texts need, such as the number of tiles.
        is_video = "pixel_values_videos" in picture.inputs
        names = self._video_names if is_video else self._names
        inputs = {name: self.sent(value) for name, value in picture.inputs.items() if name in names}
        stated = {name: getattr(module.config, name, None) for name in _STATED if name in names}
        output = (module.get_video_features if is_video else module.get_image_features)(**inputs, **stated)
        # older versions of transformers return the embeddings themselves
        features = _joined(getattr(output, "pooler_output", output))
        added = getattr(output, "deepstack_features", None) or ()
        return torch.cat([features, *map(_joined, added)], dim=-1)

    def encode_all(self, pictures: Sequence[DecodedImage]) -> list[Tensor]:
        """Return what `encode` returns for each of `pictures`."""
        return [self.encode(picture) for picture in pictures]

    def num_rows(self, picture: DecodedImage) -> int:
        """Return the number of rows that `encode` returns. Raises `UnfitImageError` for an image that the model cannot
        read.
        """
        text = picture.text or self.family.text_of(width=picture.width, height=picture.height)
        return num_embeddings(text.parts)

    def sent(self, value: Tensor) -> Tensor:
        """Copy a tensor of the image processor, or embeddings, to the device; floating-point tensors get the dtype of
        the tower's weights.
        """
        return devices.send(value.to(self._dtype) if value.is_floating_point() else value, self._device)


def _joined(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Return the embeddings of one image as one tensor [tokens, hidden], also if the tower has returned a list of
    tiles.
    """
    return torch.cat([part.flatten(0, -2) for part in ([features] if isinstance(features, Tensor) else features)])


def load_tower(config: EngineConfig, target: torch.device, dtype: torch.dtype) -> VisionTower | None:
    """Load the vision tower of a model to the device `target`, and try it on some images. Return None if the model has
    none that is supported. Raises `ModelError` if that fails.
    """
    folder = model_folder(config.model)
    family = family_of(folder)
    if family is None:
        return None
    reader = HFImageReader(folder, family)
    hf_config = read_config(folder, config)
    module = _load(folder, hf_config, config, dtype, target)
    use_window_attention(module)
    tower = VisionTower(module.to(target).eval().requires_grad_(False), family, reader, target)
    width = _try(tower, folder, hf_config.get_text_config())
    if width:
        facts, name = ModelFacts.of(folder), str(dtype).removeprefix("torch.")
        settings = [facts.images, facts.videos, facts.sounds, dict(family.processor_settings)]
        fingerprint = encoder_fingerprint(folder, config, settings, target.type)
        reader.embedding_layout = embedding_layout(fingerprint, width=width, dtype=name)
    return tower


def _load(
    folder: Path, hf_config: HfConfig, config: EngineConfig, dtype: torch.dtype, target: torch.device
) -> nn.Module:
    """Load the vision tower and projector of the model in a folder into host memory, without its decoder. Random
    weights are drawn on `target`. Raises `ModelError`.
    """
    import transformers

    hf_config = getattr(hf_config, "thinker_config", hf_config)
    kind = transformers.MODEL_MAPPING[type(hf_config)]
    if not kind.base_model_prefix:  # then it does not find its weights in the files of the whole model
        kind = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(hf_config)]
    alone = _without_layers(hf_config)
    try:
        if config.load_format == "dummy":
            torch.manual_seed(config.seed)
            # As those of the decoder: a processor would take a minute for the weights of a tower of 0.7 billion.
            with target:
                module: nn.Module = kind._from_config(alone, dtype=dtype)
            report: dict[str, Any] = {"missing_keys": (), "mismatched_keys": ()}
        else:
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
    lacking = (*report["missing_keys"], *map(str, report["mismatched_keys"]))
    lacking = tuple(name.removeprefix("model.") for name in lacking)
    # The decoder's weights are missing on purpose.
    if missing := [name for name in lacking if not name.startswith(_DECODERS)]:
        raise ModelError(f"{folder} lacks {len(missing)} weights of its vision tower, such as {sorted(missing)[0]}")
    if hasattr(module, "lm_head"):
        module = cast(Any, module).model
    for name in _DECODERS:
        if hasattr(module, name.rstrip(".")):
            setattr(module, name.rstrip("."), None)
    return module


def _without_layers(hf_config: HfConfig) -> HfConfig:
    """Return the config of a model without decoder layers, so that transformers builds little more than its tower."""
    # transformers builds tower and decoder together. Without layers the decoder is only its embeddings, which are freed
    # at the end.
    alone = copy.deepcopy(hf_config)
    text = alone.get_text_config()
    text.num_hidden_layers, text.layer_types = 0, []
    if alone.model_type == "gemma4":
        # These belong to layers, and its audio is not read.
        text.num_kv_shared_layers = text.hidden_size_per_layer_input = 0
        alone.audio_config = None
    # Quantized checkpoints keep their tower in floats; transformers would ask for the libraries of the format.
    for part in (alone, text):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return alone


def _try(tower: VisionTower, folder: Path, text: HfConfig) -> int:
    """Encode some images of different sizes, so that an image processor that does not fit the tower is found at load.
    Return the width of embeddings, or 0 if the model reads none of these images and no audio.

    `text` is the decoder's config. Raises `ModelError` if encoding fails or the number of embeddings is wrong.
    """
    row_width = 0
    for width, height in _TRIED:
        try:
            wanted = num_embeddings(tower.family.parts(width=width, height=height))
            encoded = tower.encode(tower.reader.picture_of(Image.new("RGB", (width, height), (90, 120, 150))))
        except UnfitImageError:
            continue
        except LOAD_ERRORS as exc:
            reason = first_line(exc)
            raise ModelError(f"the image processor in {folder} does not fit its vision tower: {reason}") from exc
        _check(encoded, wanted, folder, text)
        row_width = encoded.shape[1]
    _try_video(tower, folder, text)
    return row_width or _try_audio(tower, folder, text)


def _try_audio(tower: VisionTower, folder: Path, text: HfConfig) -> int:
    """Encode a second of silence, and return the width of its embeddings; 0 if the model reads no audio. Raises
    `ModelError`.
    """
    if tower.reader.sounds is None or tower.family.audio is None:
        return 0
    silence = np.zeros(tower.family.audio.rate_hz, dtype=np.float32)
    try:
        sound = tower.reader.sounds.sound_of(silence)
        assert sound.text is not None, "the text of an audio is known"
        encoded = tower.encode(sound)
        _check(encoded, num_embeddings(sound.text.parts), folder, text)
        return encoded.shape[1]
    except LOAD_ERRORS as exc:
        reason = first_line(exc)
        raise ModelError(f"the feature extractor in {folder} does not fit its audio encoder: {reason}") from exc


def _try_video(tower: VisionTower, folder: Path, text: HfConfig) -> None:
    """Encode a short video, if the model reads videos. Raises `ModelError`."""
    if tower.family.video is None:
        return
    count = tower.family.video.least_frames * 2
    width, height = _TRIED[0]
    clip = Clip(width=width, height=height, num_frames=count, fps=2.0, indexes=list(range(count)), is_raw=True)
    frames = [torch.full((3, height, width), 120, dtype=torch.uint8)] * count
    try:
        for picture in tower.reader.clip_of(iter(frames), clip, tower.family):
            assert picture.text is not None, "the text of a video is known"
            _check(tower.encode(picture), num_embeddings(picture.text.parts), folder, text)
    except LOAD_ERRORS as exc:
        reason = first_line(exc)
        raise ModelError(f"the video processor in {folder} does not fit its vision tower: {reason}") from exc


def _check(encoded: Tensor, wanted: int, folder: Path, text: HfConfig) -> None:
    """Raise `ModelError` unless the tower has returned as many embeddings as the config says, of a size that fits."""
    if (found := len(encoded)) != wanted:
        raise ModelError(
            f"the tower in {folder} returns {found} embeddings for an image or audio, but its config says {wanted}"
        )
    # The embeddings come first, then features for layers before the last one.
    if encoded.shape[1] > text.hidden_size * text.num_hidden_layers:
        raise ModelError(
            f"the vision tower in {folder} has features for more layers than the {text.num_hidden_layers} of its"
            " decoder: give deepstack_visual_indexes fewer entries"
        )

"""Decodes windows of audio and computes mel features with the model's own extractor. Callable from any thread.

A window is a WAV file with 16-bit samples, at most as long as the encoder's window. The router cuts and converts what
clients send into such files, so that instances need no decoders of audio.
"""

import wave
from collections.abc import Iterable
from io import BytesIO
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton_serve.audio_samples import Samples, has_floats, mono, read_wav, resampled
from baton_serve.contracts.audio import MAX_CHANNELS, MAX_RATE_HZ, RATE_STEP_HZ, SAMPLE_BYTES
from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.media import digest_of
from baton_serve.engine.errors import ModelError, RequestError
from baton_serve.engine.model.vision.image_types import DecodedImage
from baton_serve.engine.model_folder import LOAD_ERRORS, first_line

_WAV_ERRORS = (wave.Error, EOFError, ValueError, OSError)


class HFAudioReader:
    """Implements `ImageReader` for audio: it turns WAV files into mel features with the feature extractor of
    transformers.
    """

    def __init__(self, folder: Path) -> None:
        """Load the feature extractor of the model in a folder. Raises `ModelError` if that fails."""
        import transformers  # takes seconds: only models with an encoder should pay them

        try:
            self._extractor: Any = transformers.AutoFeatureExtractor.from_pretrained(folder, local_files_only=True)
            self._rate_hz = int(self._extractor.sampling_rate)
            self._window_s = float(self._extractor.chunk_length)
        except LOAD_ERRORS as exc:
            raise ModelError(f"cannot load a feature extractor from {folder}: {first_line(exc)}") from exc
        self.embedding_layout: KVLayout | None = None
        """The layout of blocks with outputs of the encoder, by which an encode instance sends them."""
        self.dtype = torch.float32
        """The dtype of features; the encoder sets its own, so that the engine's thread has nothing to convert."""

    def read(self, images: Iterable[bytes]) -> dict[bytes, DecodedImage]:
        """Return the mel features of audio files, by the digest of the file: [mel bins, frames] in host memory.
        `images` are WAV files, each of which holds one window of audio.

        Raises `RequestError` for a file that is longer than the encoder's window, or not a WAV file with 16-bit
        samples.
        """
        return {digest_of(file): DecodedImage({"input_features": self._read(file)}, 0, 0) for file in images}

    def silence(self) -> Tensor:
        """Return the mel features [mel bins, frames] of a window of silence, for a test of the encoder."""
        return self._features(np.zeros(self._rate_hz, dtype=np.float32))

    def _read(self, data: bytes) -> Tensor:
        """Return the mel features [mel bins, frames] of one WAV file. Raises `RequestError` if it cannot be read."""
        if has_floats(data):
            return self._of_floats(data)
        try:
            with wave.open(BytesIO(data)) as file:
                rate, channels, frames = file.getframerate(), file.getnchannels(), file.getnframes()
                # The header is checked before the samples are read.
                if file.getsampwidth() != SAMPLE_BYTES or frames < 1:
                    raise ValueError("a window has samples of 16 bits")
                if not 0 < rate <= MAX_RATE_HZ or rate % RATE_STEP_HZ:
                    raise ValueError(f"its sample rate is {rate} Hz")
                if channels > MAX_CHANNELS or frames > ceil(self._window_s * rate):
                    raise ValueError(f"{frames} samples of {channels} channels at {rate} Hz are more than a window")
                samples = np.frombuffer(file.readframes(frames), dtype="<i2").reshape(-1, channels)
        except _WAV_ERRORS as exc:
            raise RequestError("invalid", f"a window of audio cannot be read: {first_line(exc)}") from exc
        return self._features(resampled(mono(samples), rate, self._rate_hz))

    def _of_floats(self, data: bytes) -> Tensor:
        """Return the same for a file whose samples are floats: those of a caller of the offline API, as they are."""
        try:
            samples, rate = read_wav(data)
            if len(samples) > ceil(self._window_s * rate):
                raise ValueError(f"{len(samples)} samples at {rate} Hz are more than a window")
        except ValueError as exc:
            raise RequestError("invalid", f"a window of audio cannot be read: {first_line(exc)}") from exc
        return self._features(resampled(samples, rate, self._rate_hz))

    def _features(self, samples: Samples) -> Tensor:
        found: Tensor = self._extractor(samples, sampling_rate=self._rate_hz, return_tensors="pt").input_features
        return found[0].to(self.dtype)

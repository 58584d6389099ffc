"""Decodes windows of audio and computes their features with the model's own extractor. Callable from any thread.

A window is a WAV file with 16-bit samples, at most as long as the encoder's window. The router cuts and converts what
clients send into such files, so that instances need no decoders of audio.
"""

import wave
from collections.abc import Iterable
from io import BytesIO
from math import ceil, gcd, pi
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton_serve.contracts.audio import MAX_CHANNELS, MAX_RATE_HZ, RATE_STEP_HZ, SAMPLE_BYTES
from baton_serve.contracts.media import digest_of
from baton_serve.engine.errors import ModelError, RequestError
from baton_serve.engine.model.vision.placeholders import DecodedImage, Pixels
from baton_serve.engine.model_folder import LOAD_ERRORS, first_line

_WAV_ERRORS = (wave.Error, EOFError, ValueError, OSError)
FILTER_ZEROS = 24
"""Zero crossings of the resampling filter on each side: more make a steeper filter."""
PASS_BAND = 0.94
"""Part of the lower rate's band that the resampling filter passes."""


class HFAudioReader:
    """Implements `ImageReader` for windows of audio, with the feature extractor of transformers."""

    def __init__(self, folder: Path) -> None:
        """Load the extractor. Raises `ModelError`."""
        import transformers  # takes seconds: only models with an encoder should pay them

        try:
            self._extractor: Any = transformers.AutoFeatureExtractor.from_pretrained(folder, local_files_only=True)
            self._rate_hz = int(self._extractor.sampling_rate)
            self._window_s = float(self._extractor.chunk_length)
        except LOAD_ERRORS as exc:
            raise ModelError(f"cannot load a feature extractor from {folder}: {first_line(exc)}") from exc

    def read(self, images: Iterable[bytes]) -> Pixels:
        """Return the features of windows, by digest.

        Raises `RequestError` for a file that is longer than a window, or not a WAV file with 16-bit samples.
        """
        return {digest_of(file): DecodedImage({"input_features": self._read(file)}, 0, 0) for file in images}

    def silence(self) -> Tensor:
        """Return the features of a window of silence."""
        return self._features(torch.zeros(int(self._rate_hz)))

    def _read(self, data: bytes) -> Tensor:
        """Return the features [mel bins, frames] of one file."""
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
                samples = torch.frombuffer(bytearray(file.readframes(frames)), dtype=torch.int16)
        except _WAV_ERRORS as exc:
            raise RequestError("invalid", f"a window of audio cannot be read: {first_line(exc)}") from exc
        mono = samples.view(-1, channels).float().mean(dim=1) / 32768.0
        return self._features(resampled(mono, rate, self._rate_hz))

    def _features(self, samples: Tensor) -> Tensor:
        found: Tensor = self._extractor(
            samples.numpy(), sampling_rate=self._rate_hz, return_tensors="pt"
        ).input_features
        return found[0].to(torch.float32)


def resampled(samples: Tensor, rate_hz: int, wanted_hz: int) -> Tensor:
    """Return float32 samples [count] at another rate: a band-limited interpolation with a Hann-windowed sinc.

    Each phase of the output has its own filter, and all phases are computed as one convolution.
    """
    if rate_hz == wanted_hz:
        return samples
    divisor = gcd(rate_hz, wanted_hz)
    step, phases = rate_hz // divisor, wanted_hz // divisor
    # Frequencies above half of the lower rate would be mirrored into the result.
    cutoff = PASS_BAND * min(1.0, wanted_hz / rate_hz)
    reach = ceil(FILTER_ZEROS / cutoff)
    offsets = torch.arange(-reach, reach + step, dtype=torch.float64)
    times = offsets[None] - torch.arange(phases, dtype=torch.float64)[:, None] * step / phases
    window = torch.cos(times.clamp(-reach, reach) * (pi / 2 / reach)).square()
    filters = (torch.sinc(times * cutoff) * window * cutoff).float()
    padded = torch.nn.functional.pad(samples, (reach, reach + step))
    found = torch.nn.functional.conv1d(padded[None, None], filters[:, None], stride=step)
    return found[0].T.reshape(-1)[: ceil(len(samples) * wanted_hz / rate_hz)]

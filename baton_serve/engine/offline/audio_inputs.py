"""Converts audio of the offline API (arrays or files) to the WAV files that the engine reads."""

from typing import Any

import numpy as np

from baton_serve.audio_cutter import AudioError, decoded
from baton_serve.audio_samples import wav_of
from baton_serve.contracts.audio import MAX_RATE_HZ, RATE_STEP_HZ, CutterLimits
from baton_serve.contracts.media import MAX_IMAGE_BYTES
from baton_serve.engine.errors import ConfigError

_RATE_HZ = 16_000
"""Rate of arrays without one, and of decoded files: that of all models that read audio."""
_LIMITS = CutterLimits(rate_hz=_RATE_HZ, window_s=0.0, max_s=MAX_IMAGE_BYTES / 2 / _RATE_HZ)


def is_list_of_sounds(value: Any) -> bool:
    """Return whether a value holds several audios. A pair of an array and its rate is one, and so is a list of
    numbers."""
    return isinstance(value, list) and not all(isinstance(one, int | float) for one in value)


def sound_file(sound: object) -> bytes:
    """Return an audio of vLLM's forms as a WAV file: a pair of samples and their rate in Hz, samples alone at 16 kHz,
    or the bytes of a file.

    Samples are floats from -1 to 1, or 16-bit integers; floats stay as they are. Raises `ConfigError` for anything
    else.
    """
    if isinstance(sound, bytes):
        return _decoded(sound)
    rate: Any = _RATE_HZ
    if isinstance(sound, tuple) and len(sound) == 2:
        sound, rate = sound
    samples = np.asarray(sound)
    if samples.ndim != 1 or not samples.size or not (samples.dtype.kind == "f" or samples.dtype == np.int16):
        raise ConfigError(
            f"an audio must have samples [count] as floats or int16, not {samples.dtype} {list(samples.shape)}"
        )
    if int(rate) != rate or not 0 < rate <= MAX_RATE_HZ or rate % RATE_STEP_HZ:
        raise ConfigError(f"the rate of an audio is {rate} Hz: use a multiple of {RATE_STEP_HZ} up to {MAX_RATE_HZ}")
    is_exact = samples.dtype.kind == "f"
    floats = samples.astype(np.float32) if is_exact else samples.astype(np.float32) / np.float32(32768.0)
    return wav_of(floats, int(rate), is_exact=is_exact)


def _decoded(file: bytes) -> bytes:
    try:
        return wav_of(decoded(file, _LIMITS), _RATE_HZ)
    except (AudioError, MemoryError) as exc:
        raise ConfigError(f"an audio cannot be read: {exc}") from exc

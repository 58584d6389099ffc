"""Decides how many tokens an audio in a chat becomes: Qwen2-Audio, Qwen-Omni, Voxtral.

An encoder reads spectra of the samples, one for each `hop` samples, and makes one embedding for several of them. The
rules and their roundings are those of transformers' processors.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from baton_serve.contracts.media import MAX_IMAGE_BYTES
from baton_serve.contracts.vision.audio_rules import SoundRules
from baton_serve.contracts.vision.family import ImageFamily
from baton_serve.contracts.vision.media_text import Parts, UnfitImageError
from baton_serve.contracts.vision.model_files import ModelFacts

_LONGEST_S = MAX_IMAGE_BYTES // 2 // 16_000 - 1
"""Longest audio in seconds whose samples at 16 kHz fit into one file of a message."""


class OneWindow(SoundRules, frozen=True, kw_only=True):
    """How Qwen2-Audio and Qwen2.5-Omni read audio: they fill it with silence up to one window, and use the embeddings
    before the silence. They do not hear audio behind the window, as in transformers."""

    @property
    def hears_all(self) -> bool:
        """Return False: the model hears its window."""
        return False

    def num_spectra(self, num_samples: int) -> int:
        """Return how many spectra begin within the audio."""
        return -(-min(num_samples, self.window_samples) // self.hop)

    def num_tokens(self, num_samples: int) -> int:
        """Return the number of embeddings: a convolution halves the spectra, and a mean of two halves them again."""
        return ((self.num_spectra(num_samples) - 1) // 2 - 1) // 2 + 1


class AllWindows(SoundRules, frozen=True, kw_only=True):
    """How Voxtral reads audio: it fills the last window with silence, and hears all windows."""

    tokens_per_window: int

    def num_tokens(self, num_samples: int) -> int:
        """Return the number of embeddings of all windows, of which the last one may be mostly silence."""
        return -(-num_samples // self.window_samples) * self.tokens_per_window


class Unfilled(SoundRules, frozen=True, kw_only=True):
    """How Qwen3-Omni reads audio: without silence added, and by three convolutions over pieces of `piece` spectra."""

    piece: int = 100

    def num_tokens(self, num_samples: int) -> int:
        """Return the number of embeddings. Each convolution halves the spectra of a piece, rounding up."""
        whole, rest = divmod(num_samples // self.hop, self.piece)
        for _ in range(3):
            rest = (rest + 1) // 2
        # The constant is transformers', also for pieces of another length than 100 spectra.
        return whole * 13 + rest


class SoundAlone(ImageFamily, frozen=True, kw_only=True):
    """The rules of a model that reads audio but no images."""

    image_token_id: int = -1

    @property
    def reads_images(self) -> bool:
        """Return False: the model has no tower for images."""
        return False

    def parts(self, *, width: int, height: int) -> Parts:
        """Raise `UnfitImageError`, since the model cannot read images."""
        raise UnfitImageError("this model reads audio, but no images")


class _Encoder(msgspec.Struct, frozen=True):
    max_source_positions: int = 1500
    hidden_size: int = 1280
    intermediate_size: int = 5120
    n_window: int = 50


class _Config(msgspec.Struct, frozen=True):
    model_type: str = ""
    audio_token_id: int | None = None
    audio_token_index: int | None = None
    audio_config: _Encoder = _Encoder()


class _Extractor(msgspec.Struct, frozen=True):
    sampling_rate: int = 16_000
    hop_length: int = 160
    chunk_length: float | None = None


_TOKENS = {
    "qwen2_audio": 151646,
    "qwen2_5_omni_thinker": 151646,
    "qwen3_omni_moe_thinker": 151646,
    "voxtral": 24,
}
"""Audio tokens of transformers' configs, for configs that do not state them."""
KINDS = tuple(_TOKENS)
"""The types of models that read audio in chats."""
_WINDOWS_S = {"qwen2_5_omni_thinker": 300.0}
"""Windows in seconds of the extractors of families, for folders that state none; 30 for others."""
_QWEN_MARKS = ("<|audio_bos|>", "<|audio_eos|>")
_MARKS: Mapping[str, tuple[str, str]] = {
    "qwen2_audio": _QWEN_MARKS,
    "qwen2_5_omni_thinker": _QWEN_MARKS,
    "qwen3_omni_moe_thinker": ("<|audio_start|>", "<|audio_end|>"),
    "voxtral": ("[BEGIN_AUDIO]", ""),
}
"""Texts around the audio token, which chat templates write that know the parts of a message."""
_MASKED: Mapping[str, Any] = {"return_attention_mask": True, "padding": "max_length"}


def sound_rules(facts: ModelFacts) -> SoundRules | None:
    """Return how a model with these files reads audio; None if it does not, or not in a way that is supported."""
    known = msgspec.convert(facts.config, _Config)
    kind, encoder = known.model_type, known.audio_config
    if kind not in _TOKENS or not facts.sounds or not facts.config.get("audio_config"):
        return None
    extractor = msgspec.convert(facts.sounds, _Extractor)
    if extractor.sampling_rate != 16_000:
        return None
    stated = known.audio_token_index if known.audio_token_id is None else known.audio_token_id
    window_s = extractor.chunk_length or _WINDOWS_S.get(kind, 30.0)
    common: dict[str, Any] = {
        "token_id": _TOKENS[kind] if stated is None else stated,
        "marks": _MARKS[kind],
        "rate_hz": extractor.sampling_rate,
        "hop": extractor.hop_length,
        "window_samples": int(window_s * extractor.sampling_rate),
        "longest_s": _LONGEST_S,
    }
    if kind == "voxtral":
        # The projector joins as many positions of the encoder as fit into its input.
        per_window = encoder.max_source_positions * encoder.hidden_size // encoder.intermediate_size
        call = {"padding": True, "truncation": False, "pad_to_multiple_of": common["window_samples"]}
        return AllWindows(**common, call_settings=call, tokens_per_window=per_window)
    if kind == "qwen3_omni_moe_thinker":
        call = {"padding": True, "truncation": False, "return_attention_mask": True}
        return Unfilled(**common, call_settings=call, piece=2 * encoder.n_window)
    common["longest_s"] = min(window_s, _LONGEST_S)
    return OneWindow(**common, call_settings=_MASKED, is_filled=kind == "qwen2_audio")


def family(facts: ModelFacts) -> ImageFamily | None:
    """Return how a model with these files reads audio, if it reads no images; None if it does not read audio."""
    rules = sound_rules(facts)
    return None if rules is None else SoundAlone(audio=rules)

"""Tiny random Whisper models, made-up and synthesised speech, and what transformers answers: the reference of all tests
with audio."""

import shutil
import subprocess
import wave
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import (
    AutoFeatureExtractor,
    GenerationConfig,
    LogitsProcessorList,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from transformers.generation import GenerationMixin, WhisperTimeStampLogitsProcessor

from tests.tiny_models import write_tokenizer

RATE_HZ = 16000
WINDOW_S = 4
"""Length of the encoder's window. Real models have 30 s; all else follows from the config."""
LANGUAGES = ("en", "de", "fr")
FIRST_SPECIAL = 271
SPECIAL = [
    "<|startoftranscript|>",
    *(f"<|{language}|>" for language in LANGUAGES),
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
]
TIMESTAMPS = [f"<|{number / 50:.2f}|>" for number in range(WINDOW_S * 50 + 1)]
IDS = {token: FIRST_SPECIAL + number for number, token in enumerate([*SPECIAL, *TIMESTAMPS])}
EOS_ID = 256
PROMPT = [IDS[token] for token in ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")]
TIMED_PROMPT = PROMPT[:-1]
SUPPRESSED = [1, 2, 7, *(IDS[token] for token in SPECIAL[:-1])]
FIRST_SUPPRESSED = [220, EOS_ID]
"""Tokens that no answer begins with."""
SENTENCES = (
    "The red baton lies on the table.",
    "Seven boats cross the harbour at noon.",
    "Please write down the second number.",
)


def write_tiny_whisper(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Makes `folder`: a Whisper model whose answers depend on the audio. float32."""
    values: dict[str, Any] = {
        "vocab_size": FIRST_SPECIAL + len(IDS),
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "num_mel_bins": 80,
        "max_source_positions": WINDOW_S * 50,
        "max_target_positions": 96,
        "pad_token_id": EOS_ID,
        "bos_token_id": EOS_ID,
        "eos_token_id": EOS_ID,
        "decoder_start_token_id": IDS["<|startoftranscript|>"],
        "init_std": 0.15,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
        **overrides,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = WhisperForConditionalGeneration(WhisperConfig(**values)).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "encoder_attn" in name and parameter.dim() == 2:
                    parameter.mul_(2.5)  # else all audio is much alike to the decoder
    model.generation_config = GenerationConfig(
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
        bos_token_id=EOS_ID,
        decoder_start_token_id=IDS["<|startoftranscript|>"],
        is_multilingual=True,
        lang_to_id={f"<|{language}|>": IDS[f"<|{language}|>"] for language in LANGUAGES},
        task_to_id={"transcribe": IDS["<|transcribe|>"], "translate": IDS["<|translate|>"]},
        no_timestamps_token_id=IDS["<|notimestamps|>"],
        prev_sot_token_id=IDS["<|startofprev|>"],
        max_initial_timestamp_index=50,
        suppress_tokens=SUPPRESSED,
        begin_suppress_tokens=FIRST_SUPPRESSED,
        max_length=values["max_target_positions"],
        return_timestamps=False,
    )
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=80, chunk_length=WINDOW_S).save_pretrained(folder)
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([*SPECIAL, *TIMESTAMPS])
    assert {token: tokenizer.token_to_id(token) for token in IDS} == IDS
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def tones(number: int, seconds: float = 3.0, rate_hz: int = RATE_HZ) -> NDArray[np.int16]:
    """Samples of one channel; each number's are others."""
    times = np.arange(int(seconds * rate_hz)) / rate_hz
    pitch = 180.0 + 70.0 * number + 40.0 * np.sin(2 * np.pi * (1.0 + 0.3 * number) * times)
    loudness = 0.5 + 0.5 * np.sin(2 * np.pi * (2.0 + 0.5 * number) * times)
    samples = loudness * (np.sin(2 * np.pi * pitch * times) + 0.4 * np.sin(2 * np.pi * 3.1 * pitch * times))
    return np.asarray(samples * 9000, dtype=np.int16)


def wav(samples: NDArray[np.int16], rate_hz: int = RATE_HZ) -> bytes:
    """A WAV file. `samples` is [count], or [count, channels]."""
    out = BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate_hz)
        file.writeframes(samples.astype("<i2").tobytes())
    return out.getvalue()


def spoken(sentence: str, folder: Path) -> bytes:
    """A WAV file that espeak-ng speaks, at its own rate of 22,050 Hz."""
    file = folder / "sentence.wav"
    subprocess.run(["espeak-ng", "-s", "200", "-w", str(file), sentence], check=True, timeout=30)
    return file.read_bytes()


def has_espeak() -> bool:
    return shutil.which("espeak-ng") is not None


class Reference:
    """transformers' own model and feature extractor, in float32."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self._model: Any = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        self._extractor: Any = AutoFeatureExtractor.from_pretrained(folder)

    def answer(
        self,
        samples: NDArray[np.int16],
        count: int,
        *,
        prompt: Sequence[int] = PROMPT,
        timestamps: bool = False,
        **options: Any,
    ) -> list[int]:
        """Return the greedy answer of transformers to one window, with the end token if it has one.

        This is one call of the general `generate` with Whisper's rules. Whisper's own continues after the last
        timestamp, in the same window.
        """
        settings = self._model.generation_config
        rules = [WhisperTimeStampLogitsProcessor(settings, begin_index=len(prompt))] if timestamps else []
        found = GenerationMixin.generate(
            self._model,
            self.features(samples.astype(np.float32) / 32768.0),
            decoder_input_ids=torch.tensor([list(prompt)]),
            logits_processor=LogitsProcessorList(rules),
            max_new_tokens=count,
            do_sample=False,
            **options,
        )
        return [int(token) for token in found[0, len(prompt) :]]

    def features(self, samples: NDArray[np.float32]) -> torch.Tensor:
        read: torch.Tensor = self._extractor(samples, sampling_rate=RATE_HZ, return_tensors="pt").input_features
        return read

"""Audio of every length becomes as many tokens in a prompt as transformers makes of it."""

from typing import Any

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import _get_feat_extract_output_lengths as omni_tokens
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import (
    _get_feat_extract_output_lengths as omni3_tokens,
)

from baton_serve.audio_samples import read_wav, wav_of
from baton_serve.contracts.media import MAX_IMAGE_BYTES
from baton_serve.contracts.vision import HEARD, SERVED, UnfitImageError, image_family, why_unread
from baton_serve.contracts.vision.model_files import ModelFacts

LENGTHS = [1, 159, 160, 161, 400, 479, 480, 481, 16_000, 16_123, 31_999, 32_000, 32_001, 50_000]
SOUNDS = {"feature_extractor_type": "WhisperFeatureExtractor", "chunk_length": 2}


def rules_of(kind: str, **audio: Any) -> Any:
    config = {"model_type": kind, "audio_config": {"d_model": 1, **audio}}
    family = image_family(ModelFacts(config=config, sounds=SOUNDS, images=SOUNDS))
    assert family is not None and family.audio is not None
    return family.audio


@pytest.mark.parametrize(
    ("kind", "call", "tokens"),
    [
        ("qwen2_audio", {"padding": "max_length"}, omni_tokens),
        ("qwen2_5_omni_thinker", {"padding": "max_length"}, omni_tokens),
        ("qwen3_omni_moe_thinker", {"padding": True, "truncation": False}, omni3_tokens),
    ],
)
def test_tokens_are_those_of_transformers(kind: str, call: dict[str, Any], tokens: Any) -> None:
    rules, extractor = rules_of(kind), WhisperFeatureExtractor(chunk_length=2, feature_size=4)
    for length in LENGTHS:
        if length < 400 and "qwen3" in kind:
            continue  # transformers computes no spectrum of it
        samples = np.zeros(length, dtype=np.float32)
        found = extractor(samples, sampling_rate=16_000, return_attention_mask=True, return_tensors="np", **call)
        wanted = int(tokens(int(found["attention_mask"].sum())))
        if wanted < 1:
            with pytest.raises(UnfitImageError, match="too short"):
                rules.text_of(length)
        else:
            assert list(rules.text_of(length).parts) == [wanted]


def test_windows_of_voxtral_are_heard_one_after_another() -> None:
    rules = rules_of("voxtral", max_source_positions=100, hidden_size=16, intermediate_size=64)
    assert [rules.num_tokens(length) for length in (1, 32_000, 32_001, 96_000)] == [25, 25, 50, 75]
    # The samples of the longest audio fit into a message.
    assert 2 * rules.longest_s * rules.rate_hz + 44 <= MAX_IMAGE_BYTES


def test_models_without_audio_name_those_with_it() -> None:
    other = ModelFacts(config={"model_type": "audioflamingo3", "audio_config": {"d_model": 1}}, sounds=SOUNDS)
    assert image_family(other) is None
    assert why_unread(other) == f"models of type audioflamingo3 are served as text; {HEARD}"
    assert "qwen2_audio" in HEARD
    assert "qwen2_audio" not in SERVED
    assert "feature extractor" in why_unread(ModelFacts(config={"model_type": "voxtral", "audio_config": {"d": 1}}))
    assert image_family(ModelFacts(config={"model_type": "voxtral"}, sounds=SOUNDS)) is None


@pytest.mark.parametrize("is_exact", [False, True])
def test_wav_files_are_read_as_they_were_written(is_exact: bool) -> None:
    samples = np.linspace(-1, 1, 1001, dtype=np.float32)
    found, rate = read_wav(wav_of(samples, 22_050, is_exact=is_exact))
    assert rate == 22_050
    np.testing.assert_allclose(found, samples, atol=0.0 if is_exact else 1 / 32768)
    for wrong in (b"", b"RIFF" * 20, wav_of(samples, 8000)[:-1]):
        with pytest.raises(ValueError, match=r"no samples|not a WAV file"):
            read_wav(wrong)
    with pytest.raises(ValueError, match="no numbers"):
        read_wav(wav_of(samples * np.float32(np.nan), 8000, is_exact=True))

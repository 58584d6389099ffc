"""Shapes of known models that read images or speech, which `baton-bench media` builds with random weights.

A folder has only the config and the settings of the reader of images or audio.
"""

import json
from pathlib import Path
from typing import Literal

Kind = Literal["images", "speech"]

_TEXT: dict[str, object] = {
    "model_type": "qwen2_5_vl_text",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_VISION: dict[str, object] = {
    "model_type": "qwen2_5_vl",
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "hidden_act": "silu",
}
_SMALL_TEXT: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [2, 3, 3]},
    "bos_token_id": 256,
    "eos_token_id": 257,
}
_SMALL_VISION: dict[str, object] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [1],
}
_SPEECH: dict[str, object] = {
    "model_type": "whisper",
    "architectures": ["WhisperForConditionalGeneration"],
    "d_model": 1280,
    "encoder_layers": 32,
    "decoder_layers": 32,
    "encoder_attention_heads": 20,
    "decoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "decoder_ffn_dim": 5120,
    "num_mel_bins": 128,
    "vocab_size": 51866,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "activation_function": "gelu",
    "bos_token_id": 50257,
    "eos_token_id": 50257,
    "pad_token_id": 50256,
    "decoder_start_token_id": 50258,
}
_SMALL_SPEECH: dict[str, object] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_mel_bins": 80,
    "vocab_size": 320,
    "max_source_positions": 100,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "pad_token_id": 256,
    "decoder_start_token_id": 257,
}
_POSITIONS_PER_S = 50
"""Outputs of Whisper's encoder for a second of audio."""


def write_media_shape(kind: Kind, folder: Path, *, is_small: bool) -> Path:
    """Write the files of a model from which an engine with `load_format="dummy"` can start, and return `folder`.

    `images` is Qwen2.5-VL 7B and `speech` is Whisper large-v3; small ones have the same parts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config, reader = _images(is_small=is_small) if kind == "images" else _speech(is_small=is_small)
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=1))
    (folder / "preprocessor_config.json").write_text(json.dumps(reader, indent=1))
    return folder


def _images(*, is_small: bool) -> tuple[dict[str, object], dict[str, object]]:
    """Return the contents of config.json and preprocessor_config.json."""
    text = {**_TEXT, **_SMALL_TEXT} if is_small else _TEXT
    config: dict[str, object] = {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "text_config": text,
        "vision_config": {**_VISION, **_SMALL_VISION} if is_small else _VISION,
        "image_token_id": 310 if is_small else 151655,
        "video_token_id": 311 if is_small else 151656,
        "vision_start_token_id": 312 if is_small else 151652,
        "vision_end_token_id": 313 if is_small else 151653,
        "tie_word_embeddings": False,
    }
    reader: dict[str, object] = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 56 * 56,
        "max_pixels": 28 * 28 * 16384,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    return config, reader


def _speech(*, is_small: bool) -> tuple[dict[str, object], dict[str, object]]:
    """Return the contents of config.json and preprocessor_config.json."""
    config = {**_SPEECH, **_SMALL_SPEECH} if is_small else _SPEECH
    positions = config["max_source_positions"]
    assert isinstance(positions, int)
    reader: dict[str, object] = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": config["num_mel_bins"],
        "sampling_rate": 16000,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": positions // _POSITIONS_PER_S,
        "padding_value": 0.0,
        "return_attention_mask": False,
    }
    return config, reader

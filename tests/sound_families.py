"""Tiny random models of every family that reads audio in chats, and what transformers answers to prompts with audio:
the reference of their tests.
"""

import json
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor
from transformers.models.voxtral.processing_voxtral import VoxtralProcessor

from tests.speech import RATE_HZ
from tests.tiny_models import write_tokenizer
from tests.vision_families import TEXT, widen

WINDOW_S = 2
"""Length of the encoder's window. Real models have 30 or 300 s; all else follows from the files."""
Samples = NDArray[np.int16]
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_ENCODER: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "num_mel_bins": 80,
    "max_source_positions": WINDOW_S * 50,
    "initializer_range": 0.2,
}
_TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "initializer_range": 0.2,
}


class SoundFamily(NamedTuple):
    """How a tiny model of a family is made. `tokens` are special tokens, by the tokenizer's names for them."""

    model: str
    config: Callable[[Callable[[str], int]], dict[str, Any]]
    processor: str
    tokens: dict[str, str]
    audio: str
    """The text that the chat template writes for an audio."""
    image: str = ""
    """The text for an image; empty if the model reads none."""


def _qwen2_audio(token: Callable[[str], int]) -> dict[str, Any]:
    return {
        "text_config": {**TEXT, "model_type": "qwen2"},
        "audio_config": {**_ENCODER, "model_type": "qwen2_audio_encoder"},
        "audio_token_index": token("<|AUDIO|>"),
    }


def _voxtral(token: Callable[[str], int]) -> dict[str, Any]:
    # Two positions of the encoder are joined, as four are in real models.
    return {
        "text_config": {**TEXT, "model_type": "llama"},
        "audio_config": {**_ENCODER, "model_type": "voxtral_encoder"},
        "audio_token_id": token("[AUDIO]"),
    }


def _omni(token: Callable[[str], int]) -> dict[str, Any]:
    return {
        "text_config": {**TEXT, "head_dim": 8, "rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}},
        "audio_config": {**_ENCODER, "output_dim": 32, "n_window": 10},
        "vision_config": {**_TOWER, "window_size": 16, "fullatt_block_indexes": [1]},
        "audio_token_index": token("<|AUDIO|>"),
        "image_token_index": token("<|IMAGE|>"),
        "video_token_index": token("<|VIDEO|>"),
        "audio_start_token_id": token("<|audio_bos|>"),
        "audio_end_token_id": token("<|audio_eos|>"),
        "vision_start_token_id": token("<|vision_bos|>"),
    }


def _omni3(token: Callable[[str], int]) -> dict[str, Any]:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return {
        "text_config": {**TEXT, **experts, "rope_parameters": _ROPE},
        "audio_config": {**_ENCODER, "output_dim": 32, "downsample_hidden_size": 16, "n_window_infer": 200},
        "vision_config": {**_TOWER, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
        "audio_token_id": token("<|AUDIO|>"),
        "image_token_id": token("<|IMAGE|>"),
        "video_token_id": token("<|VIDEO|>"),
        "audio_start_token_id": token("<|audio_bos|>"),
        "vision_start_token_id": token("<|vision_bos|>"),
    }


_AUDIO_TOKENS = {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
_OMNI_TOKENS = {
    **_AUDIO_TOKENS,
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
}
_HEARD, _SEEN = "<|audio_bos|><|AUDIO|><|audio_eos|>", "<|vision_bos|><|IMAGE|><|vision_eos|>"
FAMILIES: dict[str, SoundFamily] = {
    "qwen2_audio": SoundFamily(
        "Qwen2AudioForConditionalGeneration", _qwen2_audio, "Qwen2AudioProcessor", _AUDIO_TOKENS, _HEARD
    ),
    "voxtral": SoundFamily(
        "VoxtralForConditionalGeneration",
        _voxtral,
        "",
        {"audio_token": "[AUDIO]", "audio_bos_token": "[BEGIN_AUDIO]"},
        "[BEGIN_AUDIO][AUDIO]",
    ),
    "qwen2_5_omni": SoundFamily(
        "Qwen2_5OmniThinkerForConditionalGeneration", _omni, "Qwen2_5OmniProcessor", _OMNI_TOKENS, _HEARD, _SEEN
    ),
    "qwen3_omni": SoundFamily(
        "Qwen3OmniMoeThinkerForConditionalGeneration", _omni3, "Qwen3OmniMoeProcessor", _OMNI_TOKENS, _HEARD, _SEEN
    ),
}


def write_sound_model(folder: Path, family: SoundFamily, *, seed: int = 0) -> Path:
    """Make `folder` with a model, its feature extractor and its tokenizer, in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=dict(family.tokens),
    )
    kind = getattr(transformers, family.model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(kind.config_class(**family.config(tokenizer.convert_tokens_to_ids))).float()
        widen(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "multi_modal_projector" in name:
                    parameter.mul_(0.4)  # else an answer has little of the text, and repeats one token
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer.chat_template = template_of(family)
    tokenizer.save_pretrained(folder)
    extractor = WhisperFeatureExtractor(feature_size=80, chunk_length=WINDOW_S)
    extractor.save_pretrained(folder)
    if family.image:
        # Checkpoints of Omni models have one file for both.
        stated = json.loads((folder / "preprocessor_config.json").read_text())
        _image_processor(family).save_pretrained(folder)
        images = json.loads((folder / "preprocessor_config.json").read_text())
        (folder / "preprocessor_config.json").write_text(json.dumps({**stated, **images}))
    return folder


def _image_processor(family: SoundFamily) -> Any:
    size = {"shortest_edge": 8 * 8, "longest_edge": 32 * 32}
    return transformers.Qwen2VLImageProcessorPil(patch_size=4, size=size)


def template_of(family: SoundFamily) -> str:
    """Return a chat template that writes what stands for each image and audio."""
    return (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
        "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'audio' %}"
        + family.audio
        + "{% elif part['type'] == 'image' %}"
        + family.image
        + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def floats(samples: Samples) -> NDArray[np.float32]:
    """Return samples as transformers takes them."""
    return np.asarray(samples / 32768.0, dtype=np.float32)


class SoundReference:
    """transformers' own model and processor of a folder, in float32."""

    def __init__(self, folder: Path, family: SoundFamily) -> None:
        torch.set_num_threads(1)
        self._family = family
        self._model: Any = getattr(transformers, family.model).from_pretrained(folder, dtype=torch.float32)
        self._model.generation_config.eos_token_id = None
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._extractor = WhisperFeatureExtractor.from_pretrained(folder)

    def inputs(self, text: str, sounds: Sequence[Samples], images: Sequence[bytes] = ()) -> dict[str, Any]:
        """Return the inputs of the model for a text with placeholders."""
        audio = [floats(one) for one in sounds]
        if not audio and not images:
            return dict(self._tokenizer(text, return_tensors="pt"))
        if not self._family.processor:
            return self._voxtral(text, audio)
        given: dict[str, Any] = {"audio": audio or None, "sampling_rate": RATE_HZ}
        kind = getattr(transformers, self._family.processor)
        if not self._family.image:
            processor = kind(feature_extractor=self._extractor, tokenizer=self._tokenizer)
            return dict(processor(text=text, return_tensors="pt", **given))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, "check_argument_for_proper_class", lambda self, name, value: None)
            processor = kind(
                image_processor=_image_processor(self._family),
                feature_extractor=self._extractor,
                tokenizer=self._tokenizer,
            )
        opened = [Image.open(BytesIO(image)).convert("RGB") for image in images]
        return dict(processor(text=text, images=opened or None, return_tensors="pt", **given))

    def _voxtral(self, text: str, audio: Sequence[NDArray[np.float32]]) -> dict[str, Any]:
        """Voxtral's own processor takes texts through another package, and audio as here."""
        holder = type("Holder", (), {"feature_extractor": self._extractor})
        call = {**VoxtralProcessor.audio_kwargs, "pad_to_multiple_of": WINDOW_S * RATE_HZ}
        call["max_source_positions"] = WINDOW_S * 100
        features, parts = [], text.split("[AUDIO]")
        written = parts[0]
        for one, after in zip(audio, parts[1:], strict=True):
            features.append(VoxtralProcessor._retrieve_input_features(holder, [one], **call))
            count = len(self._model.get_audio_features(features[-1]).pooler_output)
            written += "[AUDIO]" * count + after
        return {**self._tokenizer(written, return_tensors="pt"), "input_features": torch.cat(features)}

    @torch.inference_mode()
    def answer(
        self, text: str, sounds: Sequence[Samples], count: int, images: Sequence[bytes] = ()
    ) -> tuple[list[int], list[int]]:
        """Return the tokens of a prompt, and transformers' greedy answer."""
        inputs = self.inputs(text, sounds, images)
        found = self._model.generate(**inputs, max_new_tokens=count, do_sample=False, pad_token_id=0)
        length = inputs["input_ids"].shape[1]
        return inputs["input_ids"][0].tolist(), found[0, length:].tolist()

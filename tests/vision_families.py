"""Tiny random models of every family that reads images, each with the files of a checkpoint, and what transformers
answers to prompts with images: the reference of their tests.
"""

import json
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast

from tests.tiny_models import write_tokenizer

SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "initializer_range": 0.2,
}
TEXT = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": 256,
    "initializer_range": 0.2,
}
EDGE = {"height": 16, "width": 16}


class VisionFamily(NamedTuple):
    """How a tiny model of a family is made. `tokens` are special tokens, by the tokenizer's names for them or none."""

    config: Callable[[Callable[[str], int]], dict[str, Any]]
    processor: str
    images: tuple[str, dict[str, Any]]
    tokens: dict[str, str]
    placeholder: str
    labels: Sequence[str] = ()
    processor_values: dict[str, Any] = {}  # noqa: RUF012 - a default that nothing changes
    smallest: int = 1
    """The smallest side in pixels that the family reads."""
    is_nested: bool = False
    """Whether processor_config.json contains the image processor's settings, as in newer checkpoints."""
    least_step: int = 1
    """The fewest tokens of a step that all images of the tests fit in."""


def _gemma3(token: Callable[[str], int]) -> dict[str, Any]:
    layers = ["sliding_attention", "full_attention"] * 2
    text = {**TEXT, "model_type": "gemma3_text", "sliding_window": 12, "layer_types": layers}
    ids = {"boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"}
    return {
        "model_type": "gemma3",
        "text_config": {**text, "query_pre_attn_scalar": 16, "tie_word_embeddings": False},
        "tie_word_embeddings": False,
        "vision_config": SIGLIP,
        "mm_tokens_per_image": 16,
        "image_token_index": token("<image_soft_token>"),
        **{name: token(value) for name, value in ids.items()},
    }


def _gemma4(**text: Any) -> Callable[[Callable[[str], int]], dict[str, Any]]:
    def config(token: Callable[[str], int]) -> dict[str, Any]:
        tower = {**SIGLIP, "model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 16}
        sizes = {"global_head_dim": 32, "vocab_size_per_layer_input": 320, "sliding_window": 12}
        return {
            "model_type": "gemma4",
            "text_config": {**TEXT, "model_type": "gemma4_text", "tie_word_embeddings": False, **sizes, **text},
            "vision_config": {**tower, "pooling_kernel_size": 2, "position_embedding_size": 512},
            "audio_config": None,
            "image_token_id": token("<|image|>"),
            "boi_token_id": token("<|image>"),
            "eoi_token_id": token("<image|>"),
            # transformers reads padding in their place, also in answers, so they must not be among the tokens.
            "video_token_id": 1001,
            "audio_token_id": 1002,
        }

    return config


def _internvl(token: Callable[[str], int]) -> dict[str, Any]:
    tower = {**SIGLIP, "model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [4, 4]}
    return {
        "model_type": "internvl",
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": tower,
        "image_token_id": token("<IMG_CONTEXT>"),
        "image_seq_length": 4,
    }


def _pixtral(model_type: str) -> Callable[[Callable[[str], int]], dict[str, Any]]:
    def config(token: Callable[[str], int]) -> dict[str, Any]:
        tower = {**SIGLIP, "model_type": "pixtral", "image_size": 32, "head_dim": 16}
        name = "image_token_id" if model_type == "lighton_ocr" else "image_token_index"
        found = {
            "model_type": model_type,
            "text_config": {**TEXT, "model_type": "qwen3" if model_type == "lighton_ocr" else "mistral"},
            "vision_config": tower,
            name: token("[IMG]"),
        }
        if model_type == "llava":
            return {**found, "vision_feature_select_strategy": "full", "vision_feature_layer": -1}
        return {**found, "spatial_merge_size": 2}

    return config


def _idefics3(model_type: str) -> Callable[[Callable[[str], int]], dict[str, Any]]:
    def config(token: Callable[[str], int]) -> dict[str, Any]:
        tower = {**SIGLIP, "model_type": f"{model_type}_vision"}
        return {
            "model_type": model_type,
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": tower,
            "image_token_id": token("<image>"),
            "scale_factor": 2,
            "pad_token_id": 256,
        }

    return config


def _onevision(token: Callable[[str], int]) -> dict[str, Any]:
    return {
        "model_type": "llava_onevision",
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": SIGLIP,
        "image_token_index": token("<image>"),
        "video_token_index": token("<video>"),
        "image_grid_pinpoints": ONEVISION_GRID,
        "vision_aspect_ratio": "anyres_max_3",
        "vision_feature_layer": -1,
    }


def _fixed(model_type: str) -> Callable[[Callable[[str], int]], dict[str, Any]]:
    def config(token: Callable[[str], int]) -> dict[str, Any]:
        text = {**TEXT, "model_type": "llama"}
        if model_type == "deepseek_vl":
            return {
                "model_type": model_type,
                "text_config": text,
                "vision_config": SIGLIP,
                "image_token_id": token("<image>"),
            }
        clip = {**SIGLIP, "model_type": "clip_vision_model", "num_hidden_layers": 3}
        index = {"image_token_index": token("<image>")}
        found = {"model_type": model_type, "text_config": text, "vision_config": clip, **index}
        if model_type == "vipllava":
            return {**found, "vision_feature_layer": [-1, -2], "image_seq_length": 16}
        return {**found, "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]], "video_token_index": token("<video>")}

    return config


def _aya_vision(token: Callable[[str], int]) -> dict[str, Any]:
    layers = ["sliding_attention", "full_attention"] * 2
    return {
        "model_type": "aya_vision",
        "text_config": {**TEXT, "model_type": "cohere2", "sliding_window": 64, "layer_types": layers},
        "vision_config": SIGLIP,
        "image_token_index": token("<|IMG_PATCH|>"),
        "downsample_factor": 2,
    }


def _paligemma(model_type: str, **text: Any) -> Callable[[Callable[[str], int]], dict[str, Any]]:
    def config(token: Callable[[str], int]) -> dict[str, Any]:
        return {
            "model_type": "paligemma",
            # Tied weights would make random models repeat one token.
            "text_config": {**TEXT, "model_type": model_type, "tie_word_embeddings": False, **text},
            "tie_word_embeddings": False,
            "vision_config": {**SIGLIP, "vision_use_head": False},
            "hidden_size": 32,
            "projection_dim": 32,
            "image_token_index": token("<image>"),
        }

    return config


_PALIGEMMA: tuple[str, tuple[str, dict[str, Any]], dict[str, str], str] = (
    "paligemma.processing_paligemma.PaliGemmaProcessor",
    ("SiglipImageProcessorPil", {"size": EDGE, "image_seq_length": 16}),
    {"image_token": "<image>"},
    "<image>",
)


ONEVISION_GRID = [[tall, wide] for tall in (16, 32, 48) for wide in (16, 32, 48)]
_PIXTRAL_IMAGES = ("PixtralImageProcessorPil", {"size": {"longest_edge": 32}, "patch_size": 4})
_PIXTRAL_TOKENS = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
_TILE_LABELS = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
_IDEFICS_TOKENS = {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>"}
_IDEFICS_IMAGES = {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 16}}

_GEMMA4: tuple[str, tuple[str, dict[str, Any]], dict[str, str], str] = (
    "gemma4.processing_gemma4.Gemma4Processor",
    ("Gemma4ImageProcessorPil", {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}),
    {
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "image_token": "<|image|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
        "audio_token": "<|audio|>",
    },
    "<|image|>",
)
_GEMMA4_PARTS = {"feature_extractor": None, "video_processor": None}

FAMILIES: dict[str, VisionFamily] = {
    "gemma3": VisionFamily(
        _gemma3,
        "gemma3.processing_gemma3.Gemma3Processor",
        ("Gemma3ImageProcessorPil", {"size": EDGE}),
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        "<start_of_image>",
        processor_values={"image_seq_length": 16},
        is_nested=True,
    ),
    # Of the smaller models, each layer reads an embedding of its own; the larger ones read images both ways.
    "gemma4": VisionFamily(
        _gemma4(
            num_hidden_layers=5,
            layer_types=[*["sliding_attention", "full_attention"] * 2, "full_attention"],
            hidden_size_per_layer_input=16,
            num_kv_shared_layers=1,
        ),
        *_GEMMA4,
        labels=["<|video|>"],
        processor_values=_GEMMA4_PARTS,
    ),
    "gemma4_both_ways": VisionFamily(
        _gemma4(
            layer_types=["sliding_attention", "full_attention"] * 2,
            hidden_size_per_layer_input=0,
            num_kv_shared_layers=0,
            use_bidirectional_attention="vision",
        ),
        *_GEMMA4,
        labels=["<|video|>"],
        processor_values=_GEMMA4_PARTS,
        least_step=80,
    ),
    "internvl": VisionFamily(
        _internvl,
        "internvl.processing_internvl.InternVLProcessor",
        ("GotOcr2ImageProcessorPil", {"size": EDGE, "max_patches": 6}),
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        "<IMG_CONTEXT>",
        processor_values={"image_seq_length": 4},
    ),
    "mistral3": VisionFamily(
        _pixtral("mistral3"),
        "pixtral.processing_pixtral.PixtralProcessor",
        _PIXTRAL_IMAGES,
        _PIXTRAL_TOKENS,
        "[IMG]",
        processor_values={"patch_size": 4, "spatial_merge_size": 2},
        smallest=9,
    ),
    "pixtral": VisionFamily(
        _pixtral("llava"),
        "pixtral.processing_pixtral.PixtralProcessor",
        _PIXTRAL_IMAGES,
        _PIXTRAL_TOKENS,
        "[IMG]",
        processor_values={"patch_size": 4, "spatial_merge_size": 1},
    ),
    "lighton_ocr": VisionFamily(
        _pixtral("lighton_ocr"),
        "lighton_ocr.processing_lighton_ocr.LightOnOcrProcessor",
        ("PixtralImageProcessorPil", {"size": {"longest_edge": 64}, "patch_size": 4}),
        _PIXTRAL_TOKENS,
        "[IMG]",
        processor_values={"patch_size": 4, "spatial_merge_size": 2},
        smallest=5,
    ),
    "idefics3": VisionFamily(
        _idefics3("idefics3"),
        "idefics3.processing_idefics3.Idefics3Processor",
        ("Idefics3ImageProcessorPil", _IDEFICS_IMAGES),
        _IDEFICS_TOKENS,
        "<image>",
        [*_TILE_LABELS, "<global-img>"],
        {"image_seq_len": 4},
    ),
    "smolvlm": VisionFamily(
        _idefics3("smolvlm"),
        "idefics3.processing_idefics3.Idefics3Processor",  # SmolVLM's own needs a package for the text of videos
        ("SmolVLMImageProcessorPil", _IDEFICS_IMAGES),
        _IDEFICS_TOKENS,
        "<image>",
        [*_TILE_LABELS, "<global-img>"],
        {"image_seq_len": 4},
    ),
    "aya_vision": VisionFamily(
        _aya_vision,
        "aya_vision.processing_aya_vision.AyaVisionProcessor",
        ("GotOcr2ImageProcessorPil", {"size": EDGE, "max_patches": 4}),
        {"image_token": "<image>", "patch_token": "<|IMG_PATCH|>"},
        "<image>",
        ["<|START_OF_IMG|>", "<|END_OF_IMG|>"],
        {"patch_size": 4, "img_size": 16, "downsample_factor": 2},
    ),
    "paligemma": VisionFamily(_paligemma("gemma"), *_PALIGEMMA, least_step=200),
    # The window is shorter than all prompts, whose tokens see each other beyond it.
    "paligemma2": VisionFamily(
        _paligemma("gemma2", sliding_window=12, query_pre_attn_scalar=16, final_logit_softcapping=30.0),
        *_PALIGEMMA,
        least_step=200,
    ),
    "deepseek_vl": VisionFamily(
        _fixed("deepseek_vl"),
        "deepseek_vl.processing_deepseek_vl.DeepseekVLProcessor",
        ("DeepseekVLImageProcessorPil", {"size": EDGE, "min_size": 2}),
        {"image_token": "<image>"},
        "<image>",
        processor_values={"num_image_tokens": 16},
    ),
    "vipllava": VisionFamily(
        _fixed("vipllava"),
        "llava.processing_llava.LlavaProcessor",
        ("CLIPImageProcessorPil", {"size": {"shortest_edge": 16}, "crop_size": EDGE}),
        {"image_token": "<image>"},
        "<image>",
        processor_values={
            "patch_size": 4,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "llava_next_video": VisionFamily(
        _fixed("llava_next_video"),
        "llava_next_video.processing_llava_next_video.LlavaNextVideoProcessor",
        (
            "LlavaNextImageProcessorPil",
            {
                "size": {"shortest_edge": 16},
                "crop_size": EDGE,
                "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]],
            },
        ),
        {"image_token": "<image>", "video_token": "<video>"},
        "<image>",
        processor_values={
            "patch_size": 4,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "llava_onevision": VisionFamily(
        _onevision,
        "llava_onevision.processing_llava_onevision.LlavaOnevisionProcessor",
        ("LlavaOnevisionImageProcessorPil", {"size": EDGE, "image_grid_pinpoints": ONEVISION_GRID}),
        {"image_token": "<image>", "video_token": "<video>"},
        "<image>",
        processor_values={
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_3",
        },
    ),
}


def write_vision_model(folder: Path, family: VisionFamily, *, seed: int = 0) -> Path:
    """Make `folder` with a model, its processor and its tokenizer, in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    tokenizer = _tokenizer(folder, family)
    values = family.config(tokenizer.convert_tokens_to_ids)
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        widen(model)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    kind, settings = family.images
    images = getattr(transformers, kind)(**settings)
    tokenizer.chat_template = template_of(family.placeholder)
    if family.is_nested:
        processor_of(family, images, tokenizer).save_pretrained(folder)
    else:
        images.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def processor_of(family: VisionFamily, images: Any, tokenizer: Any) -> Any:
    """Return the whole processor of a family; without the part for videos, which needs torchvision."""
    module, _, name = family.processor.rpartition(".")
    # Some of them are offered by transformers only beside torchvision, which their images do not need.
    pixtral = "transformers.models.pixtral.image_processing"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, f"{pixtral}_pixtral", import_module(f"{pixtral}_pil_pixtral"))
        kind = getattr(import_module(f"transformers.models.{module}"), name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "check_argument_for_proper_class", lambda self, name, value: None)
        return kind(image_processor=images, tokenizer=tokenizer, **family.processor_values)


def widen(model: torch.nn.Module) -> None:
    """Draw weights so that answers depend on every token and every image."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
            elif parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif any(part in name for part in ("projector", "connector", "projection")):
                parameter.normal_(0.0, 0.5)


def _tokenizer(folder: Path, family: VisionFamily) -> Any:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=dict(family.tokens),
    )
    tokenizer.add_tokens(list(family.labels), special_tokens=True)
    tokenizer.save_pretrained(folder)
    return tokenizer


def template_of(placeholder: str) -> str:
    """Return a chat template that writes a placeholder for each image."""
    return (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
        "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
        + placeholder
        + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


class VisionReference:
    """transformers' own model and processor of a folder, in float32."""

    def __init__(self, folder: Path, family: VisionFamily) -> None:
        torch.set_num_threads(1)
        self._model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self._model.generation_config.eos_token_id = None
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        images = getattr(transformers, family.images[0]).from_pretrained(folder)
        self._processor = processor_of(family, images, tokenizer)

    def tokens(self, text: str, images: Sequence[bytes], **settings: Any) -> dict[str, Any]:
        """Return the inputs of the model for a text with placeholders. `settings` are those of the processor."""
        opened = [Image.open(BytesIO(image)).convert("RGB") for image in images]
        if not opened:
            found = dict(self._processor.tokenizer(text, return_tensors="pt"))
            if self._model.config.model_type == "paligemma":
                # Its processor refuses text alone. To the model all of a prompt is a prefix, as the zeros say.
                found["token_type_ids"] = torch.zeros_like(found["input_ids"])
            return found
        with warnings.catch_warnings():
            # PaliGemma's processor passes tensors to numpy in a deprecated way.
            warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
            return dict(self._processor(text=text, images=opened, return_tensors="pt", **settings))

    @torch.inference_mode()
    def answer(self, text: str, images: Sequence[bytes], count: int, **settings: Any) -> tuple[list[int], list[int]]:
        """Return the tokens of a prompt, and transformers' greedy answer. `settings` are those of the processor."""
        inputs = self.tokens(text, images, **settings)
        inputs.pop("num_crops", None)
        inputs.pop("labels", None)
        found = self._model.generate(**inputs, max_new_tokens=count, do_sample=False, pad_token_id=0)
        length = inputs["input_ids"].shape[1]
        return inputs["input_ids"][0].tolist(), found[0, length:].tolist()


def stored_settings(folder: Path, file: str) -> dict[str, Any]:
    """Return the contents of a JSON file of a model."""
    return dict(json.loads((folder / file).read_text()))

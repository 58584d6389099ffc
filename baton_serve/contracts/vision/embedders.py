"""Decides which models compute vectors of images, and how an image or a text becomes an input.

Decoders such as Qwen3-VL-Embedding read images within a text. Models with two towers (CLIP, SigLIP) and those with many
vectors for a page (ColPali, ColQwen2) compute an image by itself, and a text by itself.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from baton_serve.contracts.vision import qwen_glm
from baton_serve.contracts.vision.family import ImageFamily
from baton_serve.contracts.vision.fixed_size import FixedImages
from baton_serve.contracts.vision.model_files import ModelFacts
from baton_serve.contracts.vision.registry import image_family

_DECODERS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Types of decoders whose inputs may have images among their text."""
TEXT_ALONE = "this model computes an image and a text apart: give one image without text, or a text without images"


class EmbedderImages(msgspec.Struct, frozen=True, kw_only=True):
    """How a model that computes vectors reads images."""

    family: ImageFamily
    is_alone: bool = False
    """True if an image is an input by itself: one image, and no text of the request."""
    image_text: str | None = None
    """The text of an input with one image, with a placeholder for it. None: the image is the whole input."""
    before: str = ""
    behind: str = ""
    """The texts that the model's processor writes before and behind each text of a request."""

    @property
    def writes_special_tokens(self) -> bool:
        """Return whether these texts contain the special tokens, so that the tokenizer adds none."""
        return self.image_text is not None

    def written(self, text: str) -> str:
        """Return the text of an input for a text of a request."""
        return f"{self.before}{text}{self.behind}"


class _Tower(msgspec.Struct, frozen=True):
    image_size: int = 224
    patch_size: int | None = None


class _Towers(msgspec.Struct, frozen=True):
    vision_config: _Tower = _Tower()


class _ColConfig(msgspec.Struct, frozen=True):
    vlm_config: dict[str, Any]


class _ColProcessor(msgspec.Struct, frozen=True):
    visual_prompt_prefix: str | None = None
    query_prefix: str | None = None


class _PaliGemma(msgspec.Struct, frozen=True):
    vision_config: _Tower = _Tower()
    image_token_index: int | None = None
    image_token_id: int | None = None


def embedder_images(facts: ModelFacts) -> EmbedderImages | None:
    """Return how a model whose files are `facts` reads images when it computes vectors; None if it reads none."""
    kind = str(facts.config.get("model_type", ""))
    decoder = image_family(facts) if kind in _DECODERS else None
    if decoder is not None:
        # Videos are not read here.
        return EmbedderImages(family=msgspec.structs.replace(decoder, video=None, audio=None))
    make = _MODELS.get(kind)
    try:
        return None if make is None or not facts.images else make(facts)
    # Another model may use the keys of a family with other types: then it is not one of this family.
    except msgspec.ValidationError:
        return None


def _two_towers(patch: int, extra: int) -> Callable[[ModelFacts], EmbedderImages]:
    """Return the maker of a family with two towers. `patch` is the size of a patch in transformers' config, and `extra`
    the number of outputs of the tower for images that belong to no patch."""

    def make(facts: ModelFacts) -> EmbedderImages:
        tower = msgspec.convert(facts.config, _Towers).vision_config
        count = (tower.image_size // (tower.patch_size or patch)) ** 2 + extra
        # No text stands beside an image, so that any token may count it.
        return EmbedderImages(family=FixedImages(image_token_id=0, count=count, facts=facts), is_alone=True)

    return make


def _colqwen2(facts: ModelFacts) -> EmbedderImages | None:
    inner = msgspec.structs.replace(facts, config=msgspec.convert(facts.config, _ColConfig).vlm_config)
    family = qwen_glm.qwen(inner)
    if family is None:
        return None
    stated = msgspec.convert(facts.processor, _ColProcessor)
    page = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|><|endoftext|>"
    return EmbedderImages(
        family=msgspec.structs.replace(family, video=None, audio=None, facts=inner),
        is_alone=True,
        image_text=stated.visual_prompt_prefix or page,
        before=stated.query_prefix or "Query: ",
        behind=f"{facts.token_text('pad_token') * 10}\n",
    )


def _colpali(facts: ModelFacts) -> EmbedderImages:
    known = msgspec.convert(msgspec.convert(facts.config, _ColConfig).vlm_config, _PaliGemma)
    tower = known.vision_config
    stated = msgspec.convert(facts.processor, _ColProcessor)
    token_id = known.image_token_index if known.image_token_id is None else known.image_token_id
    begin, page = facts.token_text("bos_token"), stated.visual_prompt_prefix
    question = "Question: " if stated.query_prefix is None else stated.query_prefix
    return EmbedderImages(
        family=FixedImages(
            image_token_id=256000 if token_id is None else token_id,
            placeholder="<image>",
            count=(tower.image_size // (tower.patch_size or 14)) ** 2,
            facts=facts,
        ),
        is_alone=True,
        image_text=f"<image>{begin}{'Describe the image.' if page is None else page}\n",
        before=f"{begin}{question}",
        behind=f"{facts.token_text('pad_token') * 10}\n",
    )


_MODELS: Mapping[str, Callable[[ModelFacts], EmbedderImages | None]] = {
    "clip": _two_towers(32, 1),
    "colpali": _colpali,
    "colqwen2": _colqwen2,
    "siglip": _two_towers(16, 0),
}
READERS = "inputs with images are read by models of these types: " + ", ".join((*_DECODERS, *_MODELS))

"""Decides which models read images, and which family's rules apply to each. A new family is a file beside this one and
a line here.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from baton_serve.contracts.media import MAX_VIDEO_FRAMES
from baton_serve.contracts.vision import (
    audio_families,
    aya_vision,
    fixed_size,
    gemma3,
    gemma4,
    idefics3,
    internvl,
    llava,
    llava_onevision,
    paligemma,
    pixtral,
    qwen_glm,
)
from baton_serve.contracts.vision.family import ImageFamily
from baton_serve.contracts.vision.model_files import EDGES, ModelFacts

FAMILIES: Mapping[str, Callable[[ModelFacts], ImageFamily | None]] = {
    "aya_vision": aya_vision.family,
    "deepseek_vl": fixed_size.family,
    "gemma3": gemma3.family,
    "gemma4": gemma4.family,
    "glm46v": qwen_glm.glm,
    "glm4v": qwen_glm.glm,
    "glm4v_moe": qwen_glm.glm,
    "glm_ocr": qwen_glm.glm,
    "idefics3": idefics3.family,
    "internvl": internvl.family,
    "lighton_ocr": pixtral.family,
    "llava": llava.family,
    "llava_next": llava.family,
    "llava_next_video": llava.family,
    "llava_onevision": llava_onevision.family,
    "mistral3": pixtral.family,
    "paligemma": paligemma.family,
    "qwen2_5_omni_thinker": qwen_glm.qwen,
    "qwen2_5_vl": qwen_glm.qwen,
    "qwen2_audio": audio_families.family,
    "qwen2_vl": qwen_glm.qwen,
    "qwen3_5": qwen_glm.qwen,
    "qwen3_5_moe": qwen_glm.qwen,
    "qwen3_omni_moe_thinker": qwen_glm.qwen,
    "qwen3_vl": qwen_glm.qwen,
    "qwen3_vl_moe": qwen_glm.qwen,
    "smolvlm": idefics3.family,
    "vipllava": fixed_size.family,
    "voxtral": audio_families.family,
}
"""By `model_type`: makes the family of a model. It returns None if the model does not read images."""
SERVED = "images are read by models of these types: " + ", ".join(
    kind for kind, make in FAMILIES.items() if make is not audio_families.family
)
HEARD = "audio in chats is read by models of these types: " + ", ".join(audio_families.KINDS)


ALIASES: Mapping[str, str] = {"max_dynamic_patch": "max_patches", "min_dynamic_patch": "min_patches"}
"""Names that other libraries give to settings."""
_MOST: Mapping[str, int] = {
    "max_patches": 64,
    "min_patches": 64,
    "num_frames": MAX_VIDEO_FRAMES,
    "fps": 1000,
    "pan_and_scan_max_num_crops": 16,
}
"""Largest values of settings that clients may send."""


def image_family(facts: ModelFacts) -> ImageFamily | None:
    """Return how a model whose files are `facts` reads images; None if it does not read images, or not in a way that is
    supported.

    It is None for a folder without an image processor: only text is served then.
    """
    try:
        return _made(facts)
    # Another model may use the keys of a family with other types: then it is not one of this family.
    except msgspec.ValidationError:
        return None


def _made(facts: ModelFacts) -> ImageFamily | None:
    make = FAMILIES.get(str(facts.config.get("model_type", "")))
    # A model that reads audio alone has no image processor.
    family = make(facts) if make is not None and (facts.images or make is audio_families.family) else None
    return None if family is None else msgspec.structs.replace(family, facts=facts)


def default_template(facts: ModelFacts) -> str | None:
    """Return the chat template for the model if its folder has none; None: it needs one."""
    family = image_family(facts)
    return None if family is None else family.chat_template or None


def configured(family: ImageFamily, settings: Mapping[str, Any]) -> ImageFamily:
    """Return how a model reads images and videos with these values of `mm_processor_kwargs`.

    Raises `ValueError` for a setting that the family does not know, or a value out of bounds.
    """
    if not settings or family.facts is None:
        return family
    named = {ALIASES.get(name, name): value for name, value in settings.items()}
    of_videos = family.video.reads if family.video is not None else frozenset[str]()
    known = family.READS | of_videos
    if others := sorted(named.keys() - known):
        names = ", ".join(sorted(known)) or "none"
        raise ValueError(f"{others[0][:40]!r} is not a setting of this model's images and videos, which are: {names}")
    if {"fps", "num_frames"} <= named.keys():
        raise ValueError("fps and num_frames exclude each other")
    for name, value in named.items():
        _check_value(name, value)
    images = _with_edges({name: value for name, value in named.items() if name in family.READS})
    clips = _with_edges({name: value for name, value in named.items() if name in of_videos})
    # Of the two, the one that is given counts, also against a value in the folder of the model.
    clips |= {"num_frames": None} if "fps" in clips and "num_frames" not in clips else {}
    try:
        made = _made(family.facts.with_settings(images, clips))
    except msgspec.ValidationError as exc:
        raise ValueError(str(exc)) from exc
    assert made is not None, "settings change no names of a family"
    return msgspec.structs.replace(made, processor_settings=made.call_settings(images))


def _with_edges(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings in which limits of pixels are edges of `size`, as all processors take them."""
    edges = {EDGES[name]: settings[name] for name in settings if name in EDGES}
    others = {name: value for name, value in settings.items() if name not in EDGES}
    return {**others, "size": {**others.get("size", {}), **edges}} if edges else others


def _check_value(name: str, value: object) -> None:
    """Raise `ValueError` unless the value is a flag, a number within bounds, or edges of a size."""
    if isinstance(value, Mapping) != (name == "size"):
        raise ValueError(f"{name} must be {'edges in pixels' if name == 'size' else 'a number'}")
    values: list[Any] = list(value.values()) if isinstance(value, Mapping) else [value]
    for one in values:
        if not isinstance(one, bool) and not (isinstance(one, int | float) and 0 < one <= _MOST.get(name, 1 << 30)):
            raise ValueError(f"{name} is out of bounds: {str(one)[:40]}")


def why_unread(facts: ModelFacts) -> str:
    """Return the reason, as text for the user, why a model with a tower for images or audio is served as text; empty if
    it has no tower, or its images or audio are read."""
    kind = str(facts.config.get("model_type", ""))
    towers = [name for name in ("vision_config", "audio_config") if facts.config.get(name)]
    if not towers or image_family(facts) is not None:
        return ""
    if towers == ["audio_config"] and kind not in audio_families.KINDS:
        return f"models of type {kind} are served as text; {HEARD}"
    if towers == ["audio_config"]:
        return "the folder has no feature extractor for 16 kHz (preprocessor_config.json)"
    if kind in FAMILIES and not facts.images:
        return "the folder has no image processor (preprocessor_config.json)"
    if kind in FAMILIES:
        return f"config.json describes a tower or a processor that is not supported in models of type {kind}"
    return f"models of type {kind} are served as text; {SERVED}"

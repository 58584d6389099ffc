"""The families of models that read images. A new family is a file beside this one and a line here."""

from collections.abc import Callable, Mapping

import msgspec

from baton_serve.contracts.vision import (
    aya_vision,
    fixed,
    gemma3,
    grids,
    idefics3,
    internvl,
    llava,
    llava_onevision,
    pixtral,
)
from baton_serve.contracts.vision.facts import ModelFacts
from baton_serve.contracts.vision.family import ImageFamily

FAMILIES: Mapping[str, Callable[[ModelFacts], ImageFamily | None]] = {
    "aya_vision": aya_vision.family,
    "deepseek_vl": fixed.family,
    "gemma3": gemma3.family,
    "glm46v": grids.glm,
    "glm4v": grids.glm,
    "glm4v_moe": grids.glm,
    "glm_ocr": grids.glm,
    "idefics3": idefics3.family,
    "internvl": internvl.family,
    "lighton_ocr": pixtral.family,
    "llava": llava.family,
    "llava_next": llava.family,
    "llava_next_video": llava.family,
    "llava_onevision": llava_onevision.family,
    "mistral3": pixtral.family,
    "qwen2_5_vl": grids.qwen,
    "qwen2_vl": grids.qwen,
    "qwen3_5": grids.qwen,
    "qwen3_5_moe": grids.qwen,
    "qwen3_vl": grids.qwen,
    "qwen3_vl_moe": grids.qwen,
    "smolvlm": idefics3.family,
    "vipllava": fixed.family,
}
"""By `model_type`: makes the family of a model. It returns None if the model does not read images."""
SERVED = "images are read by models of these types: " + ", ".join(FAMILIES)


def image_family(facts: ModelFacts) -> ImageFamily | None:
    """Return how a model whose files are `facts` reads images; None if it does not read images, or not in a way that is
    supported.

    It is None for a folder without an image processor: only text is served then.
    """
    make = FAMILIES.get(str(facts.config.get("model_type", "")))
    try:
        return make(facts) if make is not None and facts.images else None
    # Another model may use the keys of a family with other types: then it is not one of this family.
    except msgspec.ValidationError:
        return None


def why_unread(facts: ModelFacts) -> str:
    """Return the reason, as text for the user, why a model with a vision tower is served without images; empty if it
    has no tower or its images are read."""
    kind = str(facts.config.get("model_type", ""))
    if not facts.config.get("vision_config") or image_family(facts) is not None:
        return ""
    if kind in FAMILIES and not facts.images:
        return "the folder has no image processor (preprocessor_config.json)"
    if kind in FAMILIES:
        return f"config.json describes a tower or a processor that is not supported in models of type {kind}"
    return f"models of type {kind} are served as text; {SERVED}"

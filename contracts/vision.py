"""Which models read images, and how many tokens of the prompt an image becomes: a rule that router and engine share.

One family is served: LLaVA, whose images are cut to one size, so that each is the same number of tokens, which stand
one behind the other like those of a text. What others have (tiles, positions in two dimensions) is not known here.
"""

import msgspec

_CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Towers, and how many of their outputs are of no patch."""
_DEFAULTS = {"clip_vision_model": (224, 32), "siglip_vision_model": (224, 16)}
TEXT_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Decoders that take an embedding as it is: others scale it, and would scale an image's too."""
SERVED = "LLaVA (model_type llava) with a CLIP or SigLIP tower before Llama, Mistral, Qwen 2 or Qwen 3 is served"


class VisionProfile(msgspec.Struct, frozen=True, kw_only=True):
    image_token_id: int
    tokens_per_image: int


class _Tower(msgspec.Struct, frozen=True):
    model_type: str = "clip_vision_model"
    image_size: int | None = None
    patch_size: int | None = None


class _Text(msgspec.Struct, frozen=True):
    model_type: str = "llama"


class _Config(msgspec.Struct, frozen=True):
    model_type: str = ""
    vision_config: _Tower | None = None
    text_config: _Text | None = None
    image_token_index: int | None = None
    image_token_id: int | None = None
    vision_feature_select_strategy: str = "default"


def vision_profile(config: object) -> VisionProfile | None:
    """Of what config.json says. None: it reads no images, or not in a way that is known here."""
    try:
        known = msgspec.convert(config, _Config)
    except msgspec.ValidationError:
        return None
    tower, text = known.vision_config, known.text_config or _Text()
    if known.model_type != "llava" or tower is None:
        return None
    if tower.model_type not in _CLASS_TOKENS or text.model_type not in TEXT_TYPES:
        return None
    size, patch = (given or default for given, default in zip(_stated(tower), _DEFAULTS[tower.model_type], strict=True))
    count = (size // patch) ** 2 + _CLASS_TOKENS[tower.model_type]
    if known.vision_feature_select_strategy == "default":
        count -= 1  # the first output is left out, whatever it is of
    token_id = known.image_token_id if known.image_token_id is not None else known.image_token_index
    return VisionProfile(image_token_id=32000 if token_id is None else token_id, tokens_per_image=count)


def _stated(tower: _Tower) -> tuple[int | None, int | None]:
    return tower.image_size, tower.patch_size

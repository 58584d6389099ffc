"""Decides which class of transformers serves as text decoder of a multimodal model, and which EOS tokens end its
answers.

A Qwen-VL model, for example, is a text model, a vision tower and a head. transformers has classes for the text model
and for all three, but none for the text model with the head.
"""

from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn
from transformers import MODEL_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from baton_serve.engine.errors import UnsupportedModelError
from baton_serve.engine.loading.unsupported_models import INSTEAD
from baton_serve.engine.model.mrope_axes import set_axes
from baton_serve.engine.model_folder import HfConfig

_TWINS = {
    "qwen2_5_omni_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_omni_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
}
"""Text models that compute exactly what another family does, by model type, except that positions have three parts.
The other family has fused layers.
"""
_PLAIN_HEADS = frozenset({"glm4v_text", "glm4v_moe_text", "glm_ocr_text", "hunyuan_vl_text", "qwen3_vl_moe_text"})
"""Text models that were compared with a plain head. Others scale or cap their logits."""


class TextDecoder(PreTrainedModel):  # type: ignore[misc]  # transformers has no types
    """A decoder of transformers with a language-model head, for models of which transformers has the text part only
    without head. `known_decoder` makes a subclass for each type of config."""

    base_class: Any = None
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - read by transformers

    def __init__(self, config: HfConfig) -> None:
        """Build the model with random weights, as classes of transformers do."""
        super().__init__(config)
        self.model = self.base_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, logits_to_keep: int | Tensor = 0, **inputs: Any) -> CausalLMOutputWithPast:
        """Return the logits of the last `logits_to_keep` tokens, of the tokens with these indexes if it is a tensor, or
        of all tokens if it is 0."""
        hidden = self.model(**inputs).last_hidden_state
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(logits=self.lm_head(hidden[:, rows]))


def known_decoder(config: HfConfig, whole_type: str) -> HfConfig:
    """Return a config for which `AutoModelForCausalLM` has a class. It is `config`, or that of another model type whose
    decoder computes the same.

    `config` is that of the decoder, and `whole_type` the type of the model of which it may be a part, such as one with
    a vision tower. A missing class is made and registered. Raises `UnsupportedModelError` if transformers has no class
    for the decoder.
    """
    if config.model_type in _TWINS:
        return _twin(config)
    if type(config) in AutoModelForCausalLM._model_mapping or getattr(config, "auto_map", None):
        return config
    if config.model_type not in _PLAIN_HEADS:
        raise UnsupportedModelError(
            f"{(config.architectures or [whole_type])[0]} cannot be served: transformers has no class for the text of"
            f" models of type {whole_type}; {INSTEAD}"
        )
    base = MODEL_MAPPING[type(config)]
    name = f"{base.__name__.removesuffix('Model')}Decoder"
    made = type(name, (TextDecoder,), {"config_class": type(config), "base_class": base, "__module__": __name__})
    _convert_weights(name, whole_type)
    # Without `exist_ok` transformers ignores classes for configs of its own.
    AutoModelForCausalLM.register(type(config), made, exist_ok=True)
    return config


def _twin(config: HfConfig) -> HfConfig:
    """Return the config for the model type whose decoder computes the same as that of `config` and for which
    transformers has a class."""
    values = config.to_dict()
    kind = CONFIG_MAPPING[_TWINS[values.pop("model_type")]]
    for rope in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(rope), dict):
            stated = {key: value for key, value in values[rope].items() if not key.startswith("mrope")}
            values[rope] = {**stated, **{k: "default" for k in ("type", "rope_type") if stated.get(k) == "mrope"}}
    twin = kind(**values)
    set_axes(twin, config)
    twin.architectures = [f"{kind.__name__.removesuffix('Config')}ForCausalLM"]
    return twin


def _convert_weights(name: str, whole_type: str) -> None:
    """Let the registered class with this name convert stored weights, such as those of experts, as transformers does
    for models of type `whole_type`."""
    # Older versions of transformers store all weights as they compute with them.
    if find_spec("transformers.conversion_mapping") is None:
        return
    from transformers import conversion_mapping as conversions

    mapping = conversions.get_checkpoint_conversion_mapping(whole_type) or []
    # Renamings of whole prefixes are `decoder_tensors`'s.
    kept = [rule for rule in mapping if isinstance(rule, conversions.WeightConverter)]
    conversions.register_checkpoint_conversion_mapping(name, kept, overwrite=True)


def eos_token_ids(module: nn.Module, text_config: HfConfig) -> frozenset[int]:
    """Return the tokens that end a sequence, from generation_config.json and config.json together."""
    ids: set[int] = set()
    for source in (getattr(module, "generation_config", None), text_config):
        value = getattr(source, "eos_token_id", None)
        # Both configs state a number or a list; Llama 3 lists further tokens in only one of them.
        ids.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return frozenset(ids)

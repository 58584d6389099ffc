"""Loads pooling models with transformers: embedding, token embedding, classifier or reranker, each with its head.

Every defect of a folder is raised as a `ModelError` that names the folder and the cause.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
)

from baton_serve.contracts.model_path import model_folder
from baton_serve.contracts.pooling import PoolingProfile
from baton_serve.contracts.vision.model_files import ModelFacts
from baton_serve.engine import device
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.errors import ConfigError, ModelError, UnsupportedModelError
from baton_serve.engine.model import rotary
from baton_serve.engine.model.context_length import max_model_len_of
from baton_serve.engine.model.fingerprint import dummy_fingerprint, weights_fingerprint
from baton_serve.engine.model.loaded_model import LoadProgress
from baton_serve.engine.model.quantized.rank_slices import split_module
from baton_serve.engine.model.rank_parts import WHOLE, RankParts, narrow, split_pooling
from baton_serve.engine.model_folder import (
    LOAD_ERRORS,
    HfConfig,
    first_line,
    is_pickled,
    quiet_transformers,
    read_config,
    weight_files,
    weights_error,
)
from baton_serve.engine.pooling.input_images import InputImages, read_images
from baton_serve.engine.pooling.model_kind import ModelKind, architecture_of
from baton_serve.engine.pooling.pooled_forward import (
    ACTIVATIONS,
    Activation,
    EncoderLogits,
    HiddenStates,
    LastTokenLogits,
    Network,
    TokenVectors,
    TwoTowers,
)
from baton_serve.engine.pooling.pooling_config import Recipe, read_json, read_recipe

OFFSET_POSITIONS = {"camembert", "data2vec-text", "mpnet", "roberta", "xlm-roberta", "xlm-roberta-xl", "xmod"}
"""Model types whose positions start after the padding token's id, so fewer tokens fit than there are positions."""
YES_NO = ["no", "yes"]
"""The answers of Qwen3-Reranker (see its model card). The score is the probability of the second against the first."""


@dataclass(frozen=True, slots=True)
class PoolingModel:
    """A loaded model that embeds or classifies. `recipe` says how hidden states become an embedding; it is None for
    classifiers, whose logits become scores by `activation`."""

    module: nn.Module
    """The weights that `network` computes with."""
    parts: RankParts
    """Which part of each weight this rank holds."""
    network: Network
    dense: list[nn.Module]
    recipe: Recipe | None
    activation: Activation
    profile: PoolingProfile
    dtype: torch.dtype
    vocab_size: int
    pad_id: int
    has_token_types: bool
    max_model_len: int
    fingerprint: str
    images: InputImages | None = None
    """How inputs may have images; None: they may not."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Everything that the functions of this module need to load a model: its folder, its config, and the dtype and
    device of the weights."""

    folder: Path
    config: EngineConfig
    hf_config: HfConfig
    dtype: torch.dtype
    target: torch.device
    rank: int


def load_pooling_model(
    config: EngineConfig, kind: ModelKind, target: torch.device, progress: LoadProgress, rank: int = 0
) -> PoolingModel:
    """Load a model, or the part of the rank `rank`, onto the device `target`; `kind` is "embed" or "classify".
    `progress` is called with the phase and its finished fraction. Outputs of modules that have a part are not summed
    yet.

    Raises `ModelError` for broken files, and `UnsupportedModelError` or `ConfigError` for a model or settings that are
    not supported.
    """
    folder = model_folder(config.model)
    hf_config = read_config(folder, config)
    if _is_gguf(config, folder):
        raise UnsupportedModelError("GGUF files are supported for models that generate text, not for pooling models")
    text_config = hf_config.get_text_config()
    if getattr(hf_config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{architecture_of(folder)} is an encoder-decoder; pooling models must be encoders or decoders:"
            " docs/reference/models.md lists the models that are served"
        )
    if config.cpu_offload_gb:
        raise ConfigError("cpu_offload_gb is supported for models that generate text, not for pooling models")
    if config.quantization is not None:
        raise ConfigError("quantization is supported for models that generate text, not for pooling models")
    if getattr(text_config, "quantization_config", None) or getattr(hf_config, "quantization_config", None):
        raise UnsupportedModelError(
            f"the weights in {folder} are quantized, which is supported for models that generate text,"
            "  not for pooling models"
        )
    dtype = device.select_dtype(target, config.dtype, getattr(text_config, "dtype", None))
    source = _Source(folder, config, hf_config, dtype, target, rank)
    progress("loading weights", 0.0)
    if kind == "embed":
        make = {"clip": _two_towers, "siglip": _two_towers, "colpali": _token_embedder, "colqwen2": _token_embedder}
        model = make.get(hf_config.model_type, _embedder)(source)
    elif architecture_of(folder).endswith(("ForCausalLM", "ForConditionalGeneration")):
        model = _token_classifier(source)
    else:
        model = _classifier(source)
    # The other ranks get the tensors of images from rank 0.
    if rank == 0:
        model = replace(model, images=read_images(folder, dtype))
    progress("loading weights", 1.0)
    return model


def _is_gguf(config: EngineConfig, folder: Path) -> bool:
    """Return whether the weights would be read from a GGUF file."""
    if config.load_format not in ("auto", "gguf"):
        return False
    is_only = any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors"))
    return config.load_format == "gguf" or Path(config.model) != folder or is_only


def _embedder(source: _Source) -> PoolingModel:
    """Load an embedding model, and the linear layers that its recipe puts after pooling."""
    module, parts = _load(source, AutoModel)
    is_decoder = _is_causal(module)
    recipe = read_recipe(source.folder, is_decoder=is_decoder)
    network = HiddenStates(module, is_decoder=is_decoder)
    model = _described(source, module, parts, network, recipe.max_seq_length)
    dense = [_dense(path, source.target) for path in recipe.dense]
    # A dense layer may change the size of the embedding.
    size = int(source.hf_config.get_text_config().hidden_size)
    for layer in dense:
        size = int(cast(Any, layer)[0].out_features)
    sizes = [int(n) for n in getattr(source.hf_config, "matryoshka_dimensions", None) or []]
    profile = PoolingProfile(
        tasks=["embed", "token_embed"],
        dimensions=size,
        is_matryoshka=bool(sizes or getattr(source.hf_config, "is_matryoshka", False)),
        matryoshka_dimensions=sizes,
    )
    return replace(model, recipe=recipe, dense=dense, profile=profile)


def _two_towers(source: _Source) -> PoolingModel:
    """Load a model with a tower for texts and one for images, such as CLIP or SigLIP."""
    module, parts = _load(source, AutoModel)
    text_config = source.hf_config.text_config
    is_padded = source.hf_config.model_type == "siglip"
    pad = ModelFacts.of(source.folder).tokenizer.get("pad_token")
    word = pad.get("content") if isinstance(pad, dict) else pad
    # The config of some checkpoints states the padding of another tokenizer.
    pad_id = _token_id(source.folder, word) if isinstance(word, str) else int(text_config.pad_token_id or 0)
    network = TwoTowers(
        module, text_tokens=int(text_config.max_position_embeddings) if is_padded else None, pad_id=pad_id
    )
    model = _described(source, module, parts, network, None)
    size = text_config.projection_size if is_padded else source.hf_config.projection_dim
    profile = PoolingProfile(tasks=["embed"], dimensions=int(size))
    return replace(model, recipe=Recipe(pooling="model"), profile=profile, pad_id=pad_id)


def _token_embedder(source: _Source) -> PoolingModel:
    """Load a model that returns one vector for each token of a page or a question, such as ColPali or ColQwen2."""
    module, parts = _load(source, AutoModelForPreTraining)
    network = TokenVectors(module, attends_both_ways=source.hf_config.model_type == "colpali")
    model = _described(source, module, parts, network, None)
    profile = PoolingProfile(tasks=["token_embed"], dimensions=int(source.hf_config.embedding_dim))
    return replace(model, recipe=Recipe(pooling="model", is_always_normalized=True), profile=profile)


def _classifier(source: _Source) -> PoolingModel:
    """Load a model with a classification head, such as a cross-encoder."""
    module, parts = _load(source, AutoModelForSequenceClassification)
    network: Network = EncoderLogits(module)
    # transformers' own head of a decoder finds the last token by the padding id, which a text may contain.
    if _is_causal(module):
        head = getattr(module, "score", None)
        if not isinstance(head, nn.Linear):
            raise UnsupportedModelError(f"{type(module).__name__} has no linear layer 'score' to classify with")
        network = LastTokenLogits(HiddenStates(_base(module), is_decoder=True), head.weight, head.bias)
    labels = source.hf_config.id2label
    profile = PoolingProfile(tasks=["classify"], labels=[str(labels[number]) for number in sorted(labels)])
    model = _described(source, module, parts, network, None)
    return replace(model, activation=_activation(source.hf_config), profile=profile)


def _token_classifier(source: _Source) -> PoolingModel:
    """Load a decoder that classifies by its next token, such as Qwen3-Reranker. Its score is the probability of "yes"
    against "no".

    Raises `UnsupportedModelError` if the config does not name the two tokens.
    """
    words = getattr(source.hf_config, "classifier_from_token", None)
    if words is None and source.hf_config.model_type in ("qwen3", "qwen3_vl"):
        words = YES_NO
    if not isinstance(words, list) or len(words) != 2:
        raise UnsupportedModelError(
            f"{source.folder} has no classification head; name its tokens for no and yes as a list"
            ' "classifier_from_token" in config.json'
        )
    no, yes = (_token_id(source.folder, str(word)) for word in words)
    is_text = architecture_of(source.folder).endswith("ForCausalLM")
    module, parts = _load(source, AutoModelForCausalLM if is_text else AutoModelForImageTextToText)
    head = module.get_output_embeddings()
    # sigmoid(yes - no) equals the softmax over the two logits, so one row of weights is enough.
    weight = (head.weight[yes].float() - head.weight[no].float())[None].to(source.dtype)
    network = LastTokenLogits(HiddenStates(_base(module), is_decoder=True), weight, None)
    model = _described(source, module, parts, network, None)
    profile = PoolingProfile(tasks=["classify"], labels=[str(words[1])])
    return replace(model, activation=torch.sigmoid, profile=profile)


def _described(
    source: _Source, module: nn.Module, parts: RankParts, network: Network, longest: int | None
) -> PoolingModel:
    """Return the loaded model with everything that embedding models and classifiers have in common; the caller adds the
    rest. `longest` is the longest input in training, in tokens, or None."""
    text_config, config = source.hf_config.get_text_config(), source.config
    max_model_len = _max_model_len(config, text_config, longest)
    variant = rotary.freeze(module, max_model_len)
    if config.load_format == "dummy":
        fingerprint = dummy_fingerprint(source.folder, variant, seed=config.seed, device=source.target.type)
    else:
        fingerprint = weights_fingerprint(
            source.folder, variant, weight_files(source.folder, config.load_format, config.loader.pattern)
        )
    pad_id = getattr(text_config, "pad_token_id", None)
    return PoolingModel(
        module=module,
        parts=parts,
        network=network,
        dense=[],
        recipe=None,
        activation=torch.sigmoid,
        profile=PoolingProfile(tasks=[]),
        dtype=source.dtype,
        vocab_size=int(text_config.vocab_size),
        pad_id=pad_id if isinstance(pad_id, int) and pad_id >= 0 else 0,
        has_token_types=(getattr(text_config, "type_vocab_size", None) or 0) > 1,
        max_model_len=max_model_len,
        fingerprint=fingerprint,
    )


def _max_model_len(config: EngineConfig, text_config: HfConfig, longest: int | None) -> int:
    """Return the longest input that is accepted, in tokens. `longest` is the model's length in training, a default
    only; None: not stated. Raises `ConfigError` if the setting `max_model_len` exceeds what the model can compute."""
    positions = max_model_len_of(config, text_config)
    if text_config.model_type in OFFSET_POSITIONS:
        usable = int(text_config.max_position_embeddings) - text_config.pad_token_id - 1
        if config.max_model_len is not None and config.max_model_len > usable:
            raise ConfigError(f"max_model_len ({config.max_model_len}) is more than the model was made for ({usable})")
        positions = min(positions, usable)
    # The length that Sentence Transformers states is only a default: longer inputs are allowed if asked for.
    return positions if config.max_model_len is not None or longest is None else min(positions, longest)


def _load(source: _Source, auto_class: Any) -> tuple[Any, RankParts]:
    """Load the model, or a rank's part of it, with `auto_class`, a class of transformers such as `AutoModel`. Return
    also which part of each weight it has. Raises `ModelError` if weights are missing or broken, and `ConfigError` or
    `UnsupportedModelError` if the model cannot be divided over the ranks."""
    config = source.config
    common = {"dtype": source.dtype, "trust_remote_code": config.trust_remote_code}
    try:
        if config.load_format == "dummy":
            torch.manual_seed(config.seed)
            with torch.device(source.target):
                module, missing = auto_class.from_config(source.hf_config, **common), []
        else:
            with quiet_transformers():
                module, report = auto_class.from_pretrained(
                    source.folder,
                    local_files_only=True,
                    use_safetensors=not is_pickled(
                        weight_files(source.folder, config.load_format, config.loader.pattern)
                    ),
                    output_loading_info=True,
                    **common,
                )
            # Encoders are pooled here, so transformers' own pooler is not used, and many folders lack it.
            missing = [key for key in sorted(report["missing_keys"]) if not key.startswith("pooler.")]
            missing += [str(key) for key in sorted(map(str, report["mismatched_keys"]))]
    except LOAD_ERRORS as exc:
        raise weights_error(source.folder, exc) from exc
    if missing:
        raise ModelError(f"{source.folder} lacks {len(missing)} weights that its config asks for, such as {missing[0]}")
    module.eval().requires_grad_(False)
    parts = WHOLE
    if config.tensor_parallel_size > 1:
        parts = split_pooling(module, source.rank, config.tensor_parallel_size)
        # Each rank reads the whole model into host memory first.
        split_module(module, parts)
        narrow(module, parts)
    return module.to(source.target), parts


def _is_causal(module: nn.Module) -> bool:
    """Return whether the model is a decoder, in which each token attends only to earlier ones."""
    return any(getattr(part, "is_causal", False) is True for part in module.modules())


def _base(module: Any) -> nn.Module:
    """Return the part of a transformers model that computes hidden states, without its head."""
    base: nn.Module = getattr(module, module.base_model_prefix)
    return base


def _activation(hf_config: HfConfig) -> Activation:
    """Return the function that turns logits into scores: the one that the config names, or else softmax, sigmoid or
    none, by the type of the classification problem.

    Raises `UnsupportedModelError` if the config names an unknown function.
    """
    # Newer and older versions of Sentence Transformers store the activation in different places.
    stated = (getattr(hf_config, "sentence_transformers", None) or {}).get("activation_fn")
    stated = stated or getattr(hf_config, "sbert_ce_default_activation_function", None)
    if stated is not None:
        name = str(stated).rsplit(".", 1)[-1]
        if name not in ACTIVATIONS:
            raise UnsupportedModelError(
                f"config.json names the activation {stated}; supported: {', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[name]
    problem = getattr(hf_config, "problem_type", None)
    if problem == "regression":
        return ACTIVATIONS["Identity"]
    return (
        torch.sigmoid if hf_config.num_labels < 2 or problem == "multi_label_classification" else ACTIVATIONS["Softmax"]
    )


def _dense(folder: Path, target: torch.device) -> nn.Module:
    """Load a linear layer of Sentence Transformers with its activation, in float32, from its folder. Raises
    `ModelError` if a file is broken, and `UnsupportedModelError` for an unknown activation."""
    rules = read_json(folder / "config.json")
    name = str(rules.get("activation_function", "Identity")).rsplit(".", 1)[-1]
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(f"{folder} names the activation {name}; supported: {', '.join(ACTIVATIONS)}")
    layer = nn.Linear(int(rules["in_features"]), int(rules["out_features"]), bias=bool(rules.get("bias", True)))
    try:
        weights = load_file(folder / "model.safetensors")
        layer.load_state_dict({key.removeprefix("linear."): value.float() for key, value in weights.items()})
    except LOAD_ERRORS as exc:
        raise ModelError(f"{folder}/model.safetensors cannot be loaded: {first_line(exc)}") from exc
    return nn.Sequential(layer, _Activated(ACTIVATIONS[name])).to(target).requires_grad_(False)


class _Activated(nn.Module):
    """Applies an activation function, as a module that can stand in `nn.Sequential`."""

    def __init__(self, function: Activation) -> None:
        super().__init__()
        self._function = function

    def forward(self, values: Tensor) -> Tensor:
        return self._function(values)


def _token_id(folder: Path, word: str) -> int:
    """Return the id of the token that is spelled `word` in the folder's tokenizer. Raises `ModelError` if it has no
    such token."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no tokenizer.json: the token {word!r} cannot be found")
    found = Tokenizer.from_file(str(path)).token_to_id(word)
    if found is None:
        raise ModelError(f"{path} has no token {word!r}, which classifier_from_token names")
    return int(found)

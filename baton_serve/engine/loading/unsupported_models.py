"""Decides by config.json alone which model types, or numbers of ranks and stages, are refused, before weights are read.

A refusal is one sentence: what the model has that is not supported, and what to use instead.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from baton_serve.engine.collectives.shard import Shard
from baton_serve.engine.collectives.stage_layers import Stage
from baton_serve.engine.errors import UnsupportedModelError
from baton_serve.engine.model.speech.decoder import cross_port
from baton_serve.engine.model_folder import HfConfig

INSTEAD = "docs/reference/models.md lists the models that are served"
"""The end of a refusal without a better remedy."""

_ENCODER = (
    "is an encoder, whose tokens attend in both directions: use a decoder such as Qwen 3 for text, and this model for"
    " embeddings (--runner pooling)"
)
_CROSS = (
    "is the decoder of an encoder-decoder, which reads an encoder's output and counts positions itself: use a decoder"
    " such as Qwen 3"
)
_OWN = (
    "computes attention itself, without transformers' attention interface, as older classes do: use a newer decoder"
    " such as Qwen 3"
)
_AUDIO = "generates codes of audio with more than one stream of tokens: use a model that generates text"
_DRAFT = "drafts tokens for another model, whose keys and values it reads: load that model instead"
_FORMAT = "stores its text part in a way that only its own class reads: use a plain text model"
_SPARSE = "chooses the tokens that it attends to with an indexer (sparse attention), which is not supported"
_DYNAMIC = "adds a mask to its scores that depends on the values of the tokens, which paged attention does not support"

_REASONS: dict[str, str] = {
    **dict.fromkeys(
        (
            "bert",
            "bert-generation",
            "big_bird",
            "camembert",
            "data2vec-text",
            "electra",
            "ernie",
            "megatron-bert",
            "rembert",
            "roberta",
            "roberta-prelayernorm",
            "roc_bert",
            "roformer",
            "xlm",
            "xlm-roberta",
            "xlm-roberta-xl",
            "xlnet",
            "xmod",
        ),
        _ENCODER,
    ),
    **dict.fromkeys(
        (
            "bart",
            "bigbird_pegasus",
            "blenderbot",
            "blenderbot-small",
            "marian",
            "mbart",
            "mvp",
            "pegasus",
            "plbart",
            "prophetnet",
            "trocr",
        ),
        _CROSS,
    ),
    **dict.fromkeys(
        ("cpmant", "ctrl", "diffllama", "git", "gpt_neox_japanese", "mpt", "openai-gpt", "reformer", "xglm"), _OWN
    ),
    **dict.fromkeys(("moshi", "musicgen", "musicgen_melody"), _AUDIO),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), _DRAFT),
    **dict.fromkeys(
        ("rwkv", "xlstm"),
        "keeps its recurrent states in a cache of its own: use Mamba 2, or a hybrid such as Qwen 3.5",
    ),
    **dict.fromkeys(("cosmos3_edge", "cosmos3_omni", "minimax_m3_vl", "molmo2", "qianfan_ocr"), _FORMAT),
    "diffusion_gemma": "writes blocks of tokens by diffusion, not one token after another: use Gemma 3",
    "doge": _DYNAMIC,
    "glm5_next": _SPARSE,
    "blt": "predicts bytes with three models and cross-attention between them: use a decoder of tokens such as Qwen 3",
    "hrm_text": "computes each layer several times for each token, and the KV cache holds one computation",
}
"""Why families cannot be served, by model type; the end of a sentence that starts with the class."""


def refuse_type(hf_config: HfConfig) -> None:
    """Raise `UnsupportedModelError` if no part of models of this type can be served as a text generator."""
    name = (getattr(hf_config, "architectures", None) or [hf_config.model_type])[0]
    if reason := _REASONS.get(hf_config.model_type):
        raise UnsupportedModelError(f"{name} {reason}; {INSTEAD}")
    if getattr(hf_config, "is_encoder_decoder", False) and cross_port(hf_config) is None:
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder; only decoders can be served, such as Qwen 3: {INSTEAD}"
        )


def refuse_ranks(name: str, text_config: HfConfig, shard: Shard) -> None:
    """Raise `UnsupportedModelError` if tensor parallelism is on and a model of this type cannot be divided."""
    reasons = {
        "zamba2": "share weights to which each adds an adapter of its own, which cannot be divided over ranks",
    }
    if not shard.is_whole and (reason := reasons.get(text_config.model_type)):
        raise UnsupportedModelError(
            f"tensor_parallel_size is {shard.size}, but layers of {name} {reason}; the largest number that works is 1"
        )


@contextmanager
def named_division(name: str, shard: Shard) -> Iterator[None]:
    """Name the number of ranks as the cause if a model that is divided over them cannot run: a layer of it reads what
    other ranks hold.
    """
    try:
        yield
    except UnsupportedModelError as exc:
        if shard.is_whole:
            raise
        raise UnsupportedModelError(
            f"tensor_parallel_size is {shard.size}, but {name} runs on one rank only, if at all; the largest number"
            f" that works is 1 ({exc})"
        ) from exc


def refuse_stages(name: str, text_config: HfConfig, stage: Stage) -> None:
    """Raise `UnsupportedModelError` if pipeline parallelism is on (`stage` is not the whole model) and this model
    cannot be divided into stages: for example, if it has layers that read the KV of other layers."""
    if stage.is_whole:
        return
    types_of_indexers = getattr(text_config, "indexer_types", None) or ()
    reasons = {
        "share weights, and read the embedding too": text_config.model_type in ("zamba", "zamba2"),
        "read the tokens that the indexer of another layer chooses": "shared" in types_of_indexers,
        "have two attention modules each": text_config.model_type == "longcat_flash",
        "read the KV of other layers": bool(getattr(text_config, "num_kv_shared_layers", 0)),
        "read an embedding of their own": bool(getattr(text_config, "hidden_size_per_layer_input", 0)),
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise UnsupportedModelError(
            f"{name} cannot be divided into stages, because layers {found[0]}: set pipeline_parallel_size to 1"
        )

"""Converts vLLM's engine arguments to an engine's config, tokenizer and defaults; decides which have no effect.

The classes `…Config` at the end are the settings as vLLM's `LLMEngine.get_…_config` returns them.
"""

import logging
import os
from argparse import ArgumentParser, Namespace
from dataclasses import MISSING, dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from baton_serve.contracts.flag_choices import REFUSED_LOAD_FORMATS, DeviceName, DtypeName, LoadFormat
from baton_serve.contracts.model_path import is_lone_gguf, model_folder
from baton_serve.contracts.vision import default_template
from baton_serve.contracts.vision.model_files import ModelFacts
from baton_serve.engine.config import EngineConfig, KvCacheDtype, Quantization
from baton_serve.engine.errors import ConfigError, ModelError
from baton_serve.engine.loading.gguf_folder import unpack_to_cache
from baton_serve.engine.offline.command_line import add_arguments
from baton_serve.engine.pooling.model_kind import ModelKind, detect_model_kind
from baton_serve.generation_config import GenerationDefaults, generation_config
from baton_serve.model_hub import HubError
from baton_serve.model_source import ModelSource, allowed_plugins, allows_long_contexts, changed_model, find_source

logger = logging.getLogger(__name__)

NEUTRAL: dict[str, tuple[object, ...]] = {
    "config_format": ("auto", "hf"),
    "data_parallel_size": (1,),
    "distributed_executor_backend": (None, "mp", "uni", "ray", "external_launcher"),
    "enable_log_requests": (False,),
    "max_num_partial_prefills": (1,),
    "num_scheduler_steps": (1,),
    "quantization": (None,),
    "scheduling_policy": ("fcfs", "priority"),
    "tokenizer_mode": ("auto", "hf"),
    "worker_use_ray": (False,),
}
"""Arguments of vLLM's `LLM` that this engine does not have, with the values that change nothing here."""
WITHOUT_EFFECT = {
    "compilation_config": "kernels are compiled and graphs are captured without it",
    "disable_async_output_proc": "outputs are always processed while the next step runs",
    "disable_log_requests": "the offline API logs no requests",
    "disable_log_stats": "the offline API logs statistics only on `do_log_stats`",
    "enable_chunked_prefill": "long prompts are always computed in chunks",
    "enable_mm_embeds": "embeddings of images are accepted from the caller's own program",
    "guided_decoding_backend": "there is one backend for structured output, llguidance",
    "max_parallel_loading_workers": "weights are read by as many threads as the machine has cores",
    "max_seq_len_to_capture": "graphs are captured for all lengths",
    "use_v2_block_manager": "there is one block manager",
}
"""Arguments of vLLM whose effect is given in any case, with the reason for the log."""
ALIASES = {"kv_cache_memory_bytes": "kv_cache_bytes", "load_in_low_bit": "quantization"}
"""vLLM's and IPEX-LLM's names of fields that `EngineConfig` calls differently."""
DTYPES = {"half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
"""vLLM's other names of dtypes."""
QUANTIZATIONS = {"awq_marlin": "awq", "gptq_marlin": "gptq", "fp4": "mxfp4", "none": None}
"""vLLM's other names of quantization formats, in lower case: its kernels for CUDA have names of their own."""
SOURCE = frozenset(entry.name for entry in fields(ModelSource)) - {"model"}
"""Arguments that name the model's files and change its config."""
OF_TEXT = ("tokenizer", "skip_tokenizer_init", "generation_config", "override_generation_config")
"""Arguments of the tokenizer and of the default sampling parameters, which the engine itself does not need."""
OF_MEDIA = ("limit_mm_per_prompt", "mm_processor_kwargs")
"""Arguments of images and videos, which the engine itself does not need."""
CHOICES: dict[str, tuple[object, ...]] = {
    "device": get_args(DeviceName),
    "dtype": get_args(DtypeName),
    "lora_dtype": get_args(DtypeName),
    "kv_cache_dtype": get_args(KvCacheDtype),
    "load_format": get_args(LoadFormat),
    "quantization": (None, *get_args(Quantization)),
}
"""Arguments with a fixed set of values."""


def _defaults() -> dict[str, Any]:
    """Return the arguments of an engine but `model`, with their defaults. None stands for the engine's own choice."""
    names = {*OF_TEXT, *OF_MEDIA, *SOURCE, *NEUTRAL, *WITHOUT_EFFECT, *ALIASES, "swap_space"}
    entries = [entry for entry in fields(EngineConfig) if entry.name != "model"]
    # An empty dict is not shared between objects, so None stands for it.
    of_engine = {entry.name: None if entry.default is MISSING else entry.default for entry in entries}
    # The offline API reads images if it can, unlike an instance.
    return {**dict.fromkeys(sorted(names)), **of_engine, "reads_images": None}


DEFAULTS = _defaults()

if TYPE_CHECKING:

    @dataclass(init=False)
    class _Arguments:
        """The generated base of `EngineArgs`: a dataclass with the fields `model` and those of `DEFAULTS`."""

        def __init__(self, model: str, **options: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...
else:
    # Without a representation: it would show the token of the hub.
    _Arguments = make_dataclass(
        "_Arguments", ["model", *((name, Any, value) for name, value in DEFAULTS.items())], repr=False
    )


class EngineArgs(_Arguments):
    """The arguments of an engine, as in vLLM: the fields of `EngineConfig` and of `ModelSource`, and vLLM's names for
    them.

    None stands for the default. Values are checked when the engine is made.
    """

    def __init__(self, model: str = "", **options: Any) -> None:
        """Keep these arguments; the others get their defaults. Raises `ConfigError` for an unknown argument."""
        if unknown := sorted(options.keys() - DEFAULTS.keys()):
            # Raise instead of ignoring a misspelled argument.
            raise ConfigError(
                f"LLM: unknown argument {unknown[0]!r}; known arguments are {', '.join(sorted(DEFAULTS))}"
            )
        super().__init__(model, **options)

    @staticmethod
    def add_cli_args(parser: ArgumentParser) -> ArgumentParser:
        """Add a flag for each argument of an engine to `parser`, and return it. A flag that the user does not give sets
        no attribute."""
        return add_arguments(parser, DEFAULTS)

    @classmethod
    def from_cli_args(cls, args: Namespace) -> "EngineArgs":
        """Return the arguments that the user has given by flags of `add_cli_args`. Attributes of other flags are
        ignored."""
        return cls(**{name: value for name, value in vars(args).items() if name == "model" or name in DEFAULTS})

    def options(self) -> dict[str, Any]:
        """Return the arguments of the engine that differ from their defaults."""
        others = {*OF_TEXT, *OF_MEDIA, *SOURCE}
        values = {name: getattr(self, name) for name in DEFAULTS if name not in others}
        # Flags give lists for tuples.
        values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return {name: value for name, value in values.items() if value is not None and value != DEFAULTS[name]}

    def source(self) -> ModelSource:
        """Return the arguments that say where the model's files come from. Raises `ConfigError` if one is not valid."""
        if not self.model:
            raise ConfigError("LLM: model is missing; give a folder, a GGUF file, or a name on the hub")
        if callable(self.hf_overrides):
            raise ConfigError("LLM: hf_overrides is a function; give the fields of config.json to change as a dict")
        values = {name: getattr(self, name) for name in SOURCE}
        return ModelSource(model=self.model, **{name: value for name, value in values.items() if value is not None})


AsyncEngineArgs = EngineArgs
"""vLLM's name of the arguments of `AsyncLLMEngine`."""


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model whose folder was read, but no weight of it: its config, its tokenizer, and what it computes.

    `tokenizer` is an object of transformers, or None with `skip_tokenizer_init`. `generation` has the default sampling
    parameters.
    """

    config: EngineConfig
    tokenizer: Any
    generation: GenerationDefaults
    kind: ModelKind
    media: tuple[dict[str, int], dict[str, Any]] = field(default_factory=lambda: ({}, {}))
    """The most images and videos in a prompt by kind, and the settings of their processor."""


def open_model(args: EngineArgs) -> OpenedModel:
    """Find the model in `args`, and read its tokenizer and what it computes. It is downloaded if necessary, and
    unpacked first if it is a single GGUF file.

    Raises `ConfigError` or `ModelError`.
    """
    source, tokenizer = args.source(), None
    if args.tokenizer not in (None, args.model):
        own = replace(source, model=args.tokenizer, revision=source.tokenizer_revision)
        tokenizer = model_folder(_found(own, weights=False))
        source = replace(source, tokenizer_revision=None)
    model = _changed(_found(source), source)
    config, folder = _config(model, args.options()), model_folder(model)
    return OpenedModel(
        config=config,
        tokenizer=None if args.skip_tokenizer_init else _tokenizer(str(tokenizer or folder), config),
        generation=_generation(folder, args),
        kind=detect_model_kind(folder, runner=config.runner, task=config.task),
        media=(_limits(args.limit_mm_per_prompt or {}), dict(args.mm_processor_kwargs or {})),
    )


def _limits(stated: dict[str, Any]) -> dict[str, int]:
    """Return vLLM's `limit_mm_per_prompt` as counts by kind. Raises `ConfigError`."""
    found = {kind: limit.get("count", 999) if isinstance(limit, dict) else limit for kind, limit in stated.items()}
    if wrong := [kind for kind, count in found.items() if kind not in ("image", "video", "audio") or count < 0]:
        raise ConfigError(f'limit_mm_per_prompt must be like {{"image": 2}}; {wrong[0]!r} is not')
    return found


def profiler_folder() -> Path:
    """Return the folder for traces of torch's profiler, which the variable VLLM_TORCH_PROFILER_DIR names. Raises
    `ConfigError` if it is not set."""
    folder = os.environ.get("VLLM_TORCH_PROFILER_DIR", "")
    if not folder:
        raise ConfigError("start_profile: set VLLM_TORCH_PROFILER_DIR to the folder for traces")
    return Path(folder)


def _found(source: ModelSource, *, weights: bool = True) -> str:
    """Return the path of a model, which is downloaded or unpacked if necessary. `weights` False leaves out the weights.
    Raises `ModelError` if it cannot be found or read."""
    try:
        path = find_source(source, os.environ, weights=weights)
    except HubError as exc:
        raise ModelError(str(exc)) from exc
    return str(unpack_to_cache(Path(path), os.environ)) if is_lone_gguf(path) else path


def _changed(path: str, source: ModelSource) -> str:
    """Return the path of a model folder in which files are replaced as the arguments `source` say, such as its config.
    Raises `ModelError` if that fails."""
    try:
        return changed_model(path, source, os.environ)
    except HubError as exc:
        raise ModelError(str(exc)) from exc


def _config(model: str, options: dict[str, Any]) -> EngineConfig:
    """Return the engine's config for the model at this path, from arguments with vLLM's names. Raises `ConfigError` for
    a value that is not supported."""
    known = {entry.name for entry in fields(EngineConfig)}
    values: dict[str, Any] = {
        "allow_long_max_model_len": allows_long_contexts(os.environ), "plugins": allowed_plugins(os.environ),
    }  # fmt: skip
    for given, value in options.items():
        name = ALIASES.get(given, given)
        if given in WITHOUT_EFFECT:
            logger.info("LLM: %s has no effect: %s", given, WITHOUT_EFFECT[given])
            continue
        if given == "swap_space":  # vLLM's is in GiB
            name, value = "host_kv_bytes", int(value * (1 << 30))
        if name in known:
            values[name] = _value(name, value)
        elif value not in NEUTRAL[name]:
            raise ConfigError(f"LLM: {given}={value!r} is not supported by this engine")
    # `EngineConfig.check` follows when the engine is made; the tokenizer is loaded before.
    # A vision tower is loaded if the model has one that is supported, so that prompts may have images.
    return EngineConfig(model=model, **{"reads_images": True, **values})


def _value(name: str, value: Any) -> Any:
    """Return the value of the argument `name` in the engine's own spelling, for example a dtype. Raises `ConfigError`
    if it is not allowed."""
    if name in ("dtype", "lora_dtype"):
        # torch's dtypes print as `torch.float16`.
        value = str(value).removeprefix("torch.")
        value = DTYPES.get(value, value)
    elif name == "quantization" and isinstance(value, str):
        value = QUANTIZATIONS.get(value.lower(), value.lower())
    if name == "load_format" and value in REFUSED_LOAD_FORMATS:
        raise ConfigError(f"LLM: load_format {value} is not supported: {REFUSED_LOAD_FORMATS[value]}")
    allowed = CHOICES.get(name)
    if allowed is not None and value not in allowed:
        raise ConfigError(f"LLM: {name} is {value!r}; it must be one of {', '.join(map(str, allowed))}")
    return value


def _tokenizer(folder: str, config: EngineConfig) -> Any:
    from transformers import AutoTokenizer  # takes seconds: import it only when a model is opened

    try:
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"cannot load a tokenizer from {folder}: {exc}") from exc
    if getattr(found, "chat_template", None) is None:
        found.chat_template = default_template(ModelFacts.of(model_folder(config.model)))
    return found


def _generation(folder: Path, args: EngineArgs) -> GenerationDefaults:
    """Return the default sampling parameters of a model from its generation_config.json and from `args`. Raises
    `ConfigError` if the file cannot be used."""
    try:
        return generation_config(folder, args.generation_config or "auto", args.override_generation_config or {})
    except ValueError as exc:
        raise ConfigError(f"LLM: {exc}") from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The settings of a model, under vLLM's names. `max_model_len` is the longest prompt plus answer, in tokens."""

    model: str
    tokenizer: str
    trust_remote_code: bool
    dtype: str
    seed: int
    max_model_len: int
    quantization: str | None
    enforce_eager: bool
    max_logprobs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """The number of devices over which the model is split, by tensor and by pipeline parallelism, under vLLM's
    names."""

    tensor_parallel_size: int
    pipeline_parallel_size: int = 1

    @property
    def world_size(self) -> int:
        """The number of processes, one for each device, that compute the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineSchedulerConfig:
    """The limits of one step, in sequences and tokens, and the longest prompt plus answer, under vLLM's names."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """The limits of LoRA adapters: how many different ones one step may have, and their largest rank."""

    max_loras: int
    max_lora_rank: int

"""Defines the settings that routers and instances share, and the order of settings in `--help`.

Add a setting to `ProcessSettings` if it means the same in every process. A class that needs another text or default for
it declares the field again.

msgspec allows a Struct only one base class with fields. So the settings of a process are a chain of classes, one for
each subject, that ends at `ProcessSettings` and `ModelSourceSettings`.
"""

import inspect
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton_serve.model_source import ModelSource

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

Host = Annotated[str, Meta(min_length=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]


class ModelSourceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of where model files come from, and of changes to config.json. Routers and instances need the same
    values.
    """

    offline: Annotated[
        bool,
        Meta(
            description="download nothing: use models in folders and in the Hugging Face cache only",
            extra={"group": "model"},
        ),
    ] = False
    revision: Annotated[str | None, Meta(description="branch, tag or commit of a model on the hub (default: main)")] = (
        None
    )
    code_revision: Annotated[
        str | None, Meta(description="revision of the Python code of a model on the hub (default: --revision)")
    ] = None
    tokenizer_revision: Annotated[
        str | None, Meta(description="revision of the tokenizer and the chat template (default: --revision)")
    ] = None
    download_dir: Annotated[
        str | None, Meta(description="folder for downloaded models (default: the Hugging Face cache, HF_HUB_CACHE)")
    ] = None
    hf_token: Annotated[
        str | None, Meta(description="token for gated models on the hub (default: HF_TOKEN)", extra={"secret": True})
    ] = None
    hf_overrides: Annotated[
        dict[str, object],
        Meta(description='fields of config.json to change: {"max_position_embeddings": 65536}'),
    ] = {}
    rope_scaling: Annotated[
        dict[str, object],
        Meta(
            description="rotary settings to use instead of those in config.json:"
            ' {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}'
        ),
    ] = {}
    rope_theta: Annotated[
        float | None, Meta(description="base of the rotary frequencies, instead of that in config.json", gt=0)
    ] = None

    def source(self, model: str) -> ModelSource:
        """Return where the files of `model`, a path or a name on the hub, come from by these settings."""
        return ModelSource(model=model, **{name: getattr(self, name) for name in ModelSourceSettings.__struct_fields__})


class ProcessSettings(ModelSourceSettings, frozen=True, kw_only=True):
    """The settings that every process of a cluster has: model files (its base class), logs and traces."""

    log_level: Annotated[
        LogLevel, Meta(description="lowest level of log messages that are written", extra={"group": "logs"})
    ] = "info"
    log_format: Annotated[LogFormat, Meta(description="format of log messages: text or JSON lines")] = "text"
    log_config_file: Annotated[
        str | None,
        Meta(
            description="JSON file with a configuration of Python's logging (dictConfig), which replaces --log-level"
            " and --log-format; names of loggers begin with baton_serve"
        ),
    ] = None
    otlp_traces_endpoint: Annotated[
        str | None,
        Meta(
            description="OTLP endpoint that receives traces, for example http://HOST:4318/v1/traces (extra"
            " baton-serve[otel]) or grpc://HOST:4317 (baton-serve[otel-grpc]) (default: no traces)"
        ),
    ] = None


def fields_in_help_order(settings: type[msgspec.Struct]) -> list[msgspec.structs.FieldInfo]:
    """Return the fields of a settings Struct: those of the class itself first, then those of its base class, and so on.

    msgspec gives the fields of base classes first. But a user should read the flags of one command before the flags
    that all commands share. A field that is declared again counts as one of the derived class.
    """
    fields = {field.name: field for field in msgspec.structs.fields(settings)}
    # A dict keeps the first place of a name, which is that of the most derived class.
    declared = dict.fromkeys(name for cls in settings.__mro__ for name in inspect.get_annotations(cls))
    return [fields[name] for name in declared if name in fields]

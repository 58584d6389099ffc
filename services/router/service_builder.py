"""Construct the services of all models behind one router, and decide which settings each model has (`--models`).

Each model has its own settings, tokenizer, queue and metrics. The models share the cluster's connections, the API keys
and the limits on all requests.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

import msgspec

from baton_serve.model_source import ModelSource
from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.local_model import local_model, names_of_model
from baton_serve.services.common.tracing import Tracing
from baton_serve.services.router.api.model_service import ModelService
from baton_serve.services.router.cluster.cluster import Cluster
from baton_serve.services.router.requests.dispatcher import AdmissionControl, Dispatcher
from baton_serve.services.router.requests.metrics import RouterMetrics
from baton_serve.services.router.requests.pooling_dispatcher import PoolingDispatcher
from baton_serve.services.router.requests.prompt_request import RequestPolicy
from baton_serve.services.router.settings import ReasoningParser, RouterSettings, ToolCallParser
from baton_serve.services.router.text.served_model import ServedModel


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One entry of `--models`: the settings that a further model may have for itself.

    All other settings are those of the router. The names and types are those of `RouterSettings`.
    """

    model: str
    tokenizer: str | None = None
    served_model_name: list[str] = []
    max_model_len: int | None = None
    generation_config: str = "auto"
    override_generation_config: dict[str, object] = {}
    chat_template: str | None = None
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    response_role: str = "assistant"
    enable_auto_tool_choice: bool = False
    tool_call_parser: ToolCallParser | None = None
    reasoning_parser: ReasoningParser | None = None
    default_ttft_ms: float | None = None
    default_itl_ms: float | None = None


def settings_of_models(settings: RouterSettings) -> list[RouterSettings]:
    """Return the router's settings for each of its models; those of `--model` come first.

    Raises `ConfigurationError` for an entry of `--models` that is not valid, and for `--enable-auto-tool-choice`
    without `--tool-call-parser`.
    """
    result = [settings]
    for name, entry in settings.models.items():
        try:
            model_settings = msgspec.convert(entry, ModelSettings)
        except msgspec.ValidationError as exc:
            raise ConfigurationError(f"--models {name}: {exc}") from exc
        # A field that an entry leaves out gets the default of `ModelSettings`, not the value given for `--model`: the
        # chat template or the parser of one model would be wrong for another.
        values: Mapping[str, object] = {
            field: getattr(model_settings, field)
            for field in model_settings.__struct_fields__
            if field != "served_model_name"
        }
        names = [name, *model_settings.served_model_name]
        result.append(msgspec.structs.replace(settings, served_model_name=names, models={}, **values))
    for each in result:
        if each.enable_auto_tool_choice and each.tool_call_parser is None:
            raise ConfigurationError("--enable-auto-tool-choice needs --tool-call-parser")
    return result


def with_local_models(settings: RouterSettings, environ: Mapping[str, str]) -> RouterSettings:
    """Return the settings in which all models and tokenizers are local paths. They are downloaded or unpacked if
    necessary.

    A model keeps its name as it was given, by which instances that got the same name are recognized. Raises
    `ConfigurationError` if a model cannot be obtained.
    """

    source = settings.source(settings.model)
    # The other settings of a source, such as its revision, are about the main model.
    plain = ModelSource(model="", offline=source.offline, download_dir=source.download_dir, hf_token=source.hf_token)

    def path_of(model: str) -> str:
        return local_model(replace(plain, model=model), environ, weights=False)

    further = {name: _with_local_model(entry, path_of) for name, entry in settings.models.items()}
    settings = msgspec.structs.replace(settings, models=further)
    if settings.tokenizer is not None:
        own = replace(plain, model=settings.tokenizer, revision=source.tokenizer_revision)
        settings = msgspec.structs.replace(settings, tokenizer=local_model(own, environ, weights=False))
        source = replace(source, tokenizer_revision=None)
    if (path := local_model(source, environ, weights=False)) == settings.model:
        return settings
    names = settings.served_model_name or names_of_model(settings.model)
    return msgspec.structs.replace(settings, model=path, served_model_name=names)


def _with_local_model(entry: object, path_of: Callable[[str], str]) -> object:
    """Return an entry of `--models` in which the model is a local path, which `path_of` returns. A malformed entry is
    returned as it is.
    """
    model = entry.get("model") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(model, str) or (path := path_of(model)) == model:
        return entry
    names = entry.get("served_model_name", [])
    if isinstance(names, list):
        names = [*names, *names_of_model(model)]
    return {**entry, "model": path, "served_model_name": names}


class Models:
    """Owns the router's models, one `ModelService` for each, from the start of the process to its end.

    The first entry of `model_services` is the default model (`--model`), which serves requests that name no model.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        cluster: Cluster,
        rules: RequestPolicy,
        admission: AdmissionControl,
        metrics: RouterMetrics,
        tracing: Tracing,
    ) -> None:
        """Load the tokenizer of every model and create its service.

        Raises `ModelFolderError` if a model's folder cannot be used, and `ConfigurationError` for settings that do not
        fit together.
        """
        self.model_services: list[ModelService] = []
        for number, own in enumerate(settings_of_models(settings)):
            for_model = metrics if number == 0 else metrics.for_model(own.served_model_name[0])
            self.model_services.append(
                ModelService(
                    own,
                    model=ServedModel.from_settings(own),
                    cluster=cluster,
                    dispatcher=Dispatcher(
                        cluster,
                        rules=rules,
                        admission=admission,
                        metrics=for_model,
                        clock=time.monotonic,
                        tracing=tracing,
                    ),
                    pooling=PoolingDispatcher(
                        cluster,
                        rules=rules,
                        admission=admission,
                        metrics=for_model,
                        clock=time.monotonic,
                        tracing=tracing,
                    ),
                    metrics=for_model,
                    clock=time.monotonic,
                )
            )
        # Only now do all services exist: each must be able to pass a request on to the model that the client names.
        for service in self.model_services:
            service.join(self.model_services)

    def start_compilers(self) -> None:
        """Start the processes that compile grammars (one per model) now, so that the first request with a grammar need
        not wait.
        """
        for service in self.model_services:
            service.model.start_compiler()

    async def end_compilers(self) -> None:
        """End the processes that compile grammars and the processes that decode audio."""
        for service in self.model_services:
            service.model.compiling.close()
            if service.audio_cutter is not None:
                service.audio_cutter.close()

    def end_requests(self) -> None:
        """Fail all running requests of all models, because the router stops."""
        for service in self.model_services:
            service.dispatcher.close()
            service.pooling.close()

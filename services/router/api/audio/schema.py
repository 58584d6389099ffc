"""Define the form fields of transcriptions and translations, and refuse combinations of them: OpenAI's, with vLLM's
additions.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.form_data import Form
from baton_serve.services.router.protocol.openai_requests import Name
from baton_serve.services.router.protocol.request_bounds import (
    NonNegative,
    OrAll,
    Penalty,
    RepetitionPenalty,
    Seed,
    Share,
    TopP,
)

ResponseFormat = Literal["json", "text", "srt", "vtt", "verbose_json"]
_LISTS = frozenset({"timestamp_granularities", "temperature", "include"})
"""Fields that may be sent several times."""


class TranscriptionRequest(BaseModel):
    """The form fields of `POST /v1/audio/transcriptions`, without the file. A form sends every value as text, which is
    converted here.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: Name | None = None
    language: Annotated[str, Field(max_length=40)] | None = None
    prompt: Annotated[str, Field(max_length=20_000)] = ""
    response_format: ResponseFormat = "json"
    timestamp_granularities: list[Literal["word", "segment"]] = []
    temperature: Annotated[list[Annotated[float, Field(ge=0, le=2)]], Field(max_length=16)] = [0.0]
    """The temperature; several are tried one after another until a window is good enough, as Whisper does."""
    stream: bool = False
    stream_include_usage: bool = False
    stream_continuous_usage_stats: bool = False
    seed: Seed | None = None
    top_p: TopP | None = None
    top_k: OrAll | None = None
    min_p: Share | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    max_completion_tokens: NonNegative | None = None

    @property
    def has_timestamps(self) -> bool:
        """Return whether the answer contains the start and end time of each segment (subtitles and `verbose_json`)."""
        return self.response_format in ("srt", "vtt", "verbose_json")


class TranslationRequest(TranscriptionRequest):
    """The form fields of `POST /v1/audio/translations`. The answer is in English; `language` is the language of the
    audio.
    """

    to_language: Literal["en"] = "en"


def read_request(form: Form, expected: type[TranscriptionRequest]) -> TranscriptionRequest:
    """Convert the fields of a form to a request of the class `expected`. Raises `BadRequestError` for a field that is
    unknown, not valid, or sent more often than allowed.
    """
    # Clients of OpenAI's library send empty texts for parameters that were left out.
    values: dict[str, object] = {}
    for name, given in form.fields.items():
        if name in _LISTS:
            values[name] = given
        elif len(given) > 1:
            raise BadRequestError(f"{name[:100]}: the form has this field several times", param=name)
        elif given[0] != "" or name == "prompt":
            values[name] = given[0]
    # These are removed, because the model below forbids unknown fields. `auto` asks for what this server does in any
    # case.
    for name in ("chunking_strategy", "include", "known_speaker_names", "known_speaker_references"):
        if name in values and values[name] != "auto":
            raise BadRequestError(f"{name} is not supported: leave it out", param=name, code="unsupported_parameter")
        values.pop(name, None)
    try:
        request = expected.model_validate(values)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        raise BadRequestError(f"{name[:100]}: {first['msg']}", param=name) from exc
    _check(request)
    return request


def _check(request: TranscriptionRequest) -> None:
    """Raise `BadRequestError` if fields of the request, each valid by itself, contradict each other or ask for
    something that is not served, such as times of words.
    """
    if "word" in request.timestamp_granularities:
        raise BadRequestError(
            "timestamp_granularities: times of words are not supported, ask for segments",
            param="timestamp_granularities",
            code="unsupported_parameter",
        )
    if request.timestamp_granularities and request.response_format != "verbose_json":
        raise BadRequestError(
            "timestamp_granularities needs response_format verbose_json", param="timestamp_granularities"
        )
    if request.stream and request.response_format not in ("json", "text"):
        raise BadRequestError(
            f"response_format {request.response_format} cannot be streamed: use json or text", param="response_format"
        )
    if request.stream and len(request.temperature) > 1:
        raise BadRequestError(
            "several temperatures cannot be streamed: a window that is not good enough is computed again",
            param="temperature",
        )

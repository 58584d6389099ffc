"""Decides the windows, languages and control tokens of a speech model (Whisper), and its prompt."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton_serve.contracts.sampling import TranscriptSpec
from baton_serve.generation_config import GENERATION_CONFIG_FILE
from baton_serve.services.router.protocol.errors import BadRequestError, ModelFolderError
from baton_serve.services.router.text.tokenization import TextTokenizer, read_json

Task = Literal["transcribe", "translate"]

_POSITIVE = Meta(gt=0)


class SpeechProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Describes one speech model (Whisper) to the router: the length of its audio windows and its control tokens.

    `languages` and `tasks` are token ids by name; they are empty for a model that knows only one language.
    """

    window_s: float
    rate_hz: int
    source_tokens: int
    """Positions of the encoder's output for one window."""
    start_token: int
    end_token: int
    previous_token: int | None
    """Stands before text that precedes the audio; None: the model has no such token."""
    no_timestamps_token: int
    languages: dict[str, int]
    tasks: dict[str, int]
    suppressed: list[int]
    first_suppressed: list[int]
    max_first_timestamp: int | None
    max_previous_tokens: int
    """Largest number of tokens of text that precedes the audio."""

    @property
    def first_timestamp(self) -> int:
        """The id of the token for the time 0. Later times have the token ids after it."""
        # The times are the last tokens of Whisper's vocabulary, directly behind this one.
        return self.no_timestamps_token + 1

    @property
    def seconds_per_timestamp(self) -> float:
        """The time in seconds between two successive timestamp tokens."""
        # Whisper's times are as fine as the encoder's output: 30 s / 1500 positions = 0.02 s.
        return self.window_s / self.source_tokens

    def prompt(
        self, language: str | None, task: Task, previous: Sequence[int] = (), *, has_timestamps: bool
    ) -> list[int]:
        """Return the token ids of the decoder prompt for an audio window. `previous` are the tokens of text that
        precedes the audio; if there are too many, the last ones are used. With `has_timestamps` the model also writes
        times.

        Raises `BadRequestError` for a task or a language that the model does not have.
        """
        found: list[int] = []
        if previous and self.previous_token is not None:
            # Of a long text the end is kept, which is nearest to the audio.
            found += [self.previous_token, *previous[-self.max_previous_tokens :]]
        found.append(self.start_token)
        # Models of one language were trained without tokens for language and task.
        if self.languages:
            found += [self._language_token(language), self.tasks[task]]
        elif task != "transcribe":
            raise BadRequestError(f"this model knows one language and does not {task}", param="model")
        return found if has_timestamps else [*found, self.no_timestamps_token]

    def rules(self, *, has_timestamps: bool) -> TranscriptSpec:
        """Return the rules by which an instance samples the tokens of a transcript, with or without timestamps."""
        return TranscriptSpec(
            suppressed=self.suppressed,
            first_suppressed=self.first_suppressed,
            first_timestamp=self.first_timestamp,
            end_token=self.end_token,
            has_timestamps=has_timestamps,
            max_first_timestamp=self.max_first_timestamp if has_timestamps else None,
        )

    def check_language(self, language: str | None) -> None:
        """Raise `BadRequestError` for a language that the model does not have. None is always allowed."""
        if language is not None and self.languages:
            self._language_token(language)

    def _language_token(self, language: str | None) -> int:
        token = self.languages.get((language or "").lower())
        if token is None:
            raise BadRequestError(
                f"language is {(language or '')[:40]!r}: this model knows {', '.join(sorted(self.languages))}",
                param="language",
            )
        return token


class _Config(msgspec.Struct, frozen=True):
    """The fields that are read from the config.json of a speech model."""

    model_type: str = ""
    max_source_positions: int = 0
    max_target_positions: int = 448
    decoder_start_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    suppress_tokens: list[int] | None = None
    begin_suppress_tokens: list[int] | None = None


class _Generation(msgspec.Struct, frozen=True):
    """The fields that are read from the generation_config.json of a speech model."""

    no_timestamps_token_id: int | None = None
    lang_to_id: dict[str, int] = {}
    task_to_id: dict[str, int] = {}
    is_multilingual: bool = True
    suppress_tokens: list[int] | None = None
    begin_suppress_tokens: list[int] | None = None
    max_initial_timestamp_index: int | None = None


class _Extractor(msgspec.Struct, frozen=True):
    """The fields that are read from the config of the feature extractor (preprocessor_config.json)."""

    chunk_length: Annotated[float, _POSITIVE] = 30.0
    sampling_rate: Annotated[int, _POSITIVE] = 16_000


class _Processor(msgspec.Struct, frozen=True):
    """The part that is read from processor_config.json, which newer versions of transformers write instead of a file
    for the feature extractor.
    """

    feature_extractor: _Extractor = _Extractor()


def speech_profile(folder: Path, tokenizer: TextTokenizer) -> SpeechProfile | None:
    """Return the profile of the speech model in a folder; None if the model does not transcribe audio.

    Raises `ModelFolderError` if a file is broken or lacks a field that is needed.
    """
    config = read_json(folder / "config.json", _Config) if (folder / "config.json").is_file() else None
    port = None if config is None else _PORTS.get(config.model_type)
    return None if port is None or config is None else port(folder, config, tokenizer)


def _whisper(folder: Path, config: _Config, tokenizer: TextTokenizer) -> SpeechProfile:
    generation = read_json(folder / GENERATION_CONFIG_FILE, _Generation) or _Generation()
    extractor = read_json(folder / "preprocessor_config.json", _Extractor)
    if extractor is None:
        extractor = (read_json(folder / "processor_config.json", _Processor) or _Processor()).feature_extractor

    def token(text: str, stated: int | None = None) -> int:
        found = tokenizer.backend.token_to_id(text) if stated is None else stated
        if found is None:
            raise ModelFolderError(f"the tokenizer in {folder} has no token {text}, which transcripts need")
        return int(found)

    eos = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
    # Names are written as tokens, such as <|en|>.
    languages = {text.strip("<|>"): number for text, number in generation.lang_to_id.items()}
    return SpeechProfile(
        window_s=extractor.chunk_length,
        rate_hz=extractor.sampling_rate,
        source_tokens=config.max_source_positions,
        start_token=token("<|startoftranscript|>", config.decoder_start_token_id),
        end_token=token("<|endoftext|>", eos),
        previous_token=tokenizer.backend.token_to_id("<|startofprev|>"),
        no_timestamps_token=token("<|notimestamps|>", generation.no_timestamps_token_id),
        languages=languages if generation.is_multilingual else {},
        tasks=generation.task_to_id,
        suppressed=_first_stated(generation.suppress_tokens, config.suppress_tokens),
        first_suppressed=_first_stated(generation.begin_suppress_tokens, config.begin_suppress_tokens),
        max_first_timestamp=generation.max_initial_timestamp_index,
        # Whisper was trained with at most half of the context before the transcript.
        max_previous_tokens=config.max_target_positions // 2 - 1,
    )


def _first_stated(*lists: list[int] | None) -> list[int]:
    """Return the first list that is not None, without its negative numbers, which in some files mean the default."""
    return [token for token in next((one for one in lists if one is not None), []) if token >= 0]


_PORTS: Mapping[str, Callable[[Path, _Config, TextTokenizer], SpeechProfile]] = MappingProxyType({"whisper": _whisper})
"""How the profile is read, by model type."""

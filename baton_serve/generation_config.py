"""Decides the default sampling parameters: generation_config.json, `--generation-config` and
`--override-generation-config`.

`--generation-config` names the file: `auto` is that of the model's folder, `vllm` none, and a folder that in it.
`--override-generation-config` replaces fields of it. As in vLLM, other fields of the file have no effect, but a folder
that the operator names may state more tokens that end a sequence.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

GENERATION_CONFIG_FILE = "generation_config.json"


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Values for parameters that a request leaves out, from generation_config.json; the names are those of the file."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


class _Overrides(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The content of `--override-generation-config`. A null takes the neutral value instead of that of the file."""

    temperature: Annotated[float, Meta(ge=0)] | UnsetType | None = UNSET
    top_p: Annotated[float, Meta(gt=0, le=1)] | UnsetType | None = UNSET
    top_k: Annotated[int, Meta(ge=-1)] | UnsetType | None = UNSET
    min_p: Annotated[float, Meta(ge=0, le=1)] | UnsetType | None = UNSET
    repetition_penalty: Annotated[float, Meta(gt=0)] | UnsetType | None = UNSET
    max_new_tokens: Annotated[int, Meta(ge=1)] | UnsetType | None = UNSET


class _File(SamplingDefaults, frozen=True, kw_only=True):
    """The fields of generation_config.json that are used."""

    eos_token_id: int | list[int] | None = None


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The defaults of requests. `max_tokens_limit` bounds the `max_tokens` of requests too; None: no bound.

    `end_token_ids` end a sequence in addition to those of the model.
    """

    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    max_tokens_limit: int | None = None
    end_token_ids: frozenset[int] = frozenset()


def generation_config(model: Path, source: str, overrides: Mapping[str, object]) -> GenerationDefaults:
    """Return the defaults for the model in the folder `model`. Raises `ValueError` with a text for the operator."""
    # A folder that the operator names must be usable; a model's own folder may lack the file.
    is_stated = source not in ("auto", "vllm")
    file = _File() if source == "vllm" else _read(Path(source) if is_stated else model, is_required=is_stated)
    given = checked_overrides(overrides)
    values = {name: given.get(name, getattr(file, name)) for name in SamplingDefaults.__struct_fields__}
    defaults = SamplingDefaults(**values)
    ends = file.eos_token_id if is_stated else None
    return GenerationDefaults(
        defaults,
        # As in vLLM: what the operator states is a limit, and what the model's own file states only a default.
        max_tokens_limit=defaults.max_new_tokens if is_stated or given.get("max_new_tokens") else None,
        end_token_ids=frozenset([ends] if isinstance(ends, int) else ends or []),
    )


def checked_overrides(overrides: Mapping[str, object]) -> dict[str, float | int | None]:
    """Return the overrides if all of them are sampling parameters in their range. Raises `ValueError` otherwise."""
    try:
        checked = msgspec.convert(dict(overrides), _Overrides)
    except msgspec.ValidationError as exc:
        known = ", ".join(SamplingDefaults.__struct_fields__)
        raise ValueError(f"--override-generation-config: {exc} (known: {known})") from exc
    found = {name: getattr(checked, name) for name in SamplingDefaults.__struct_fields__}
    return {name: value for name, value in found.items() if value is not UNSET}


def _read(folder: Path, *, is_required: bool) -> _File:
    path = folder / GENERATION_CONFIG_FILE
    if not path.is_file():
        if is_required:
            raise ValueError(f"--generation-config {folder}: it must be auto, vllm, or a folder with {path.name}")
        return _File()
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ValueError(f"{path} cannot be read: {exc}") from exc

"""Decides which keys `--model-loader-extra-config` may have for each load format.

| Load format | Keys |
|---|---|
| auto, safetensors, pt, npcache | `enable_multithread_load`, `num_threads` |
| bitsandbytes | `qlora_adapter_name_or_path` |
| sharded_state | `pattern` |
"""

import re
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from baton_serve.contracts.flag_choices import LoadFormat

SHARD_PATTERN = "model-rank-{rank}-part-{part}.safetensors"
"""Names of the files of `save_sharded_state`."""
KEYS: Mapping[LoadFormat, tuple[str, ...]] = {
    "auto": ("enable_multithread_load", "num_threads"),
    "safetensors": ("enable_multithread_load", "num_threads"),
    "pt": ("enable_multithread_load", "num_threads"),
    "npcache": ("enable_multithread_load", "num_threads"),
    "bitsandbytes": ("qlora_adapter_name_or_path",),
    "sharded_state": ("pattern",),
}
"""The keys of each load format. Formats that are not listed have none."""
_FIELDS = ("rank", "part")


class LoaderOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings in `model_loader_extra_config`, which belong to a load format of vLLM. None leaves the choice to the
    loader."""

    enable_multithread_load: bool | None = None
    """False: one thread copies weights."""
    num_threads: Annotated[int, Meta(ge=1, le=256)] | None = None
    """Threads that copy weights to a device or to a rank; None: up to 8, by the number of processors."""
    pattern: str = SHARD_PATTERN
    """Names of the files of sharded_state, with `{rank}` and `{part}` for the numbers."""
    qlora_adapter_name_or_path: str | None = None
    """Folder of a LoRA adapter: only the modules that it changes are rounded to NF4."""

    @property
    def copy_threads(self) -> int | None:
        """Number of threads that copy weights to the device; None: by the number of processors."""
        return 1 if self.enable_multithread_load is False else self.num_threads


def loader_options(load_format: LoadFormat, given: Mapping[str, object]) -> LoaderOptions:
    """Check `given`, the content of `model_loader_extra_config`, for this load format, and return it as options. Raises
    `ValueError` with a text that names the wrong key."""
    known = KEYS.get(load_format, ())
    # A misspelled key would be ignored, and the load would only be slower or use other files.
    if unknown := sorted(set(given) - set(known)):
        keys = f"its keys are {', '.join(known)}" if known else "it has no settings"
        raise ValueError(f"model_loader_extra_config has {unknown[0]!r}, but with load_format {load_format} {keys}")
    # msgspec's own checks name the key and the value that is allowed.
    try:
        options = msgspec.convert(dict(given), LoaderOptions)
    except msgspec.ValidationError as exc:
        raise ValueError(f"model_loader_extra_config: {exc}") from exc
    # Without the number of the part, the files of a large rank would overwrite each other.
    fields = re.findall(r"\{(.*?)\}", options.pattern)
    if sorted(fields) != sorted(_FIELDS) or "/" in options.pattern or not options.pattern.endswith(".safetensors"):
        raise ValueError(
            f"model_loader_extra_config: pattern is {options.pattern!r}; it must be the name of a .safetensors file"
            " with {rank} and {part} once each"
        )
    return options

"""Resolves the settings that name a model to a folder, and changes its config.json (`--hf-overrides`) there.

Changed files are in a folder in this user's cache, whose other files are links to the model's own. So every process
reads one config: the router, the loaders, all ranks, and the fingerprint, which differs because KV differs.
"""

import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton_serve.contracts.model_path import cache_folder, model_folder
from baton_serve.model_hub import HubError, is_hub_name, obtain_model

logger = logging.getLogger(__name__)

_TOKENIZER_FILE = re.compile(
    r"(tokenizer|vocab|merges|special_tokens_map|added_tokens|chat_template|tekken|spiece)[^/]*|[^/]+\.(tiktoken|model)"
)
"""Files of a tokenizer and of chat templates."""
_CODE_FILE = re.compile(r"[^/]+\.py")
_ROPE = ("rope_scaling", "rope_theta", "rope_parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model as a user names it, with the names of vLLM's settings. A revision is a branch, a tag or a commit."""

    model: str
    offline: bool = False
    revision: str | None = None
    code_revision: str | None = None
    tokenizer_revision: str | None = None
    download_dir: str | None = None
    hf_token: str | None = None
    hf_overrides: Mapping[str, object] = field(default_factory=dict)
    rope_scaling: Mapping[str, object] = field(default_factory=dict)
    rope_theta: float | None = None

    @property
    def changes(self) -> dict[str, object]:
        """Return the fields of config.json that the settings change."""
        changes = dict(self.hf_overrides)
        if self.rope_scaling:
            changes["rope_scaling"] = dict(self.rope_scaling)
        if self.rope_theta is not None:
            changes["rope_theta"] = self.rope_theta
        return changes

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment in which the hub's cache and token are those of the settings."""
        own = {"HF_HUB_CACHE": self.download_dir, "HF_TOKEN": self.hf_token}
        return {**environ, **{name: value for name, value in own.items() if value}}


def allowed_plugins(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the names in VLLM_PLUGINS, which may be empty; None if the variable is not set."""
    stated = environ.get("VLLM_PLUGINS")
    return None if stated is None else tuple(sorted({name.strip() for name in stated.split(",")} - {""}))


def allows_long_contexts(environ: Mapping[str, str]) -> bool:
    """Return whether the operator accepts contexts beyond a model's own limit, by vLLM's variable."""
    return environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "").lower() in ("1", "true")


def find_source(source: ModelSource, environ: Mapping[str, str], *, weights: bool = True) -> str:
    """Return the path of the model: unchanged for a path, downloaded if necessary for a name on the hub.

    Raises `HubError`.
    """
    if is_hub_name(source.model):
        return str(_obtain(source, environ, source.revision, weights=weights))
    given = {
        "revision": source.revision,
        "code_revision": source.code_revision,
        "tokenizer_revision": source.tokenizer_revision,
    }
    for name, value in given.items():
        if value is not None:
            logger.warning("%s has no effect: %s is a path, not a name on the hub", name, source.model)
    return source.model


def changed_model(path: str, source: ModelSource, environ: Mapping[str, str]) -> str:
    """Return the path of the model with the changes of the settings; `path` itself if they change nothing.

    `path` is a folder with config.json, or a GGUF file in one. Raises `HubError` for changes that are not possible.
    """
    folder = model_folder(path)
    files = {file.name: file for file in folder.iterdir()} if folder.is_dir() else {}
    own = dict(files)
    if is_hub_name(source.model):
        files = _other_revision(files, source, environ, source.code_revision, _CODE_FILE)
        files = _other_revision(files, source, environ, source.tokenizer_revision, _TOKENIZER_FILE)
    if files == own and not source.changes:
        return path
    config = _changed_config(folder, source.changes)
    key = json.dumps([str(folder.resolve()), config, sorted(map(str, files.values()))], sort_keys=True)
    made = cache_folder(environ) / "models" / hashlib.sha256(key.encode()).hexdigest()[:16]
    try:
        _write(made, files, config)
    except OSError as exc:
        raise HubError(
            f"the changed config of {source.model} cannot be written to {made}: {exc}: set XDG_CACHE_HOME to a folder"
            " that this user can write"
        ) from exc
    return str(made if folder == Path(path) else made / Path(path).name)


def _obtain(source: ModelSource, environ: Mapping[str, str], revision: str | None, *, weights: bool) -> Path:
    """Return the local path of a revision."""
    variables = source.variables(environ)
    return obtain_model(source.model, variables, offline=source.offline, weights=weights, revision=revision)


def _other_revision(
    files: Mapping[str, Path],
    source: ModelSource,
    environ: Mapping[str, str],
    revision: str | None,
    kind: re.Pattern[str],
) -> dict[str, Path]:
    """Return the files, those of one kind from another revision of the repository."""
    if revision is None or revision == source.revision:
        return dict(files)
    folder = _obtain(source, environ, revision, weights=False)
    if not folder.is_dir():
        raise HubError(f"{source.model}: a GGUF file contains its tokenizer: leave out the revision of the tokenizer")
    kept = {name: path for name, path in files.items() if not kind.fullmatch(name)}
    return kept | {path.name: path for path in folder.iterdir() if kind.fullmatch(path.name)}


def _changed_config(folder: Path, changes: Mapping[str, object]) -> dict[str, Any]:
    """Return the model's config with changed fields. Raises `HubError` if there is none to change."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, RecursionError, ValueError) as exc:
        raise HubError(f"{path} cannot be changed: {exc}: give the folder of a Hugging Face model") from exc
    if not isinstance(config, dict):
        raise HubError(f"{path} is not an object: give the folder of a Hugging Face model")
    return change_config(config, changes)


def change_config(config: Mapping[str, Any], changes: Mapping[str, object]) -> dict[str, Any]:
    """Return `config`, the content of config.json, with `changes`.

    Configs of parts, such as `text_config`, are changed field by field. Rotary settings are written in the form that
    the config has already, because two forms together would contradict each other. Raises `HubError` if a model has
    different rotary settings for different layers.
    """
    result = dict(config)
    for name, value in changes.items():
        own = result.get(name)
        if name.endswith("_config") and name != "quantization_config" and isinstance(own, dict):
            result[name] = change_config(own, value) if isinstance(value, Mapping) else value
        elif name not in _ROPE:
            result[name] = value
    return _change_rope(result, {name: changes[name] for name in _ROPE if name in changes})


def _change_rope(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with other rotary settings."""
    if not changes:
        return config
    # A config with a text model has them there.
    if isinstance(text := config.get("text_config"), dict) and not any(name in config for name in _ROPE):
        return {**config, "text_config": _change_rope(dict(text), changes)}
    stated = config.get("rope_parameters")
    if "rope_parameters" in changes:
        config = {name: value for name, value in config.items() if name != "rope_scaling"}
        theta = (stated or {}).get("rope_theta", config.get("rope_theta"))
        given = changes["rope_parameters"]
        is_plain = isinstance(given, Mapping) and not any(isinstance(part, Mapping) for part in given.values())
        add = {"rope_theta": theta} if is_plain and theta is not None else {}
        return config | {"rope_parameters": {**add, **given} if isinstance(given, Mapping) else given}
    if not isinstance(stated, dict):
        return config | dict(changes)
    if any(isinstance(part, dict) for part in stated.values()):
        raise HubError("this model's layers have different rotary settings: give them all as rope_parameters")
    theta = {"rope_theta": stated["rope_theta"]} if "rope_theta" in stated else {}
    parameters = {**theta, **(changes["rope_scaling"] or {})} if "rope_scaling" in changes else dict(stated)
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    if "rope_theta" in changes:
        parameters["rope_theta"] = changes["rope_theta"]
    return config | {"rope_parameters": parameters}


def _write(folder: Path, files: Mapping[str, Path], config: Mapping[str, Any]) -> None:
    """Write the folder, or update it. Other processes may read it or write the same at the same time."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as name:
        made = Path(name)
        for file, path in files.items():
            if file != "config.json":
                # The path may be a link of the hub's cache, relative to its own folder.
                (made / file).symlink_to(os.path.abspath(path))
        (made / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for path in made.iterdir():
            path.replace(folder / path.name)
    for path in folder.iterdir():
        if path.name not in files and not path.name.startswith(".new-"):
            path.unlink(missing_ok=True)

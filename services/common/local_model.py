"""Makes the model that a command names usable: downloads a model of the hub, and unpacks a single GGUF file.

It needs neither torch nor numpy, so that the router can use it.
"""

import subprocess
from collections.abc import Mapping
from pathlib import Path

from baton_serve.child_command import module_command
from baton_serve.contracts.model_path import gguf_cache_folder, is_lone_gguf
from baton_serve.model_hub import HubError
from baton_serve.model_source import ModelSource, changed_model, find_source
from baton_serve.services.common.errors import ConfigurationError

UNPACK_DEADLINE_S = 600.0
"""Longest time that the child process may take. transformers needs tens of seconds on a busy host."""


def local_model(source: ModelSource, environ: Mapping[str, str], *, weights: bool = True) -> str:
    """Return the local path of the model that `source` names: a folder with config and tokenizer, or a GGUF file in
    such a folder. Download it or unpack it first if necessary.

    Without `weights`, only config and tokenizer of a hub's model are downloaded, unless they are in its GGUF file.
    `environ` has the process's variables, such as HF_HOME. Raises `ConfigurationError` if the model cannot be obtained.
    """
    try:
        path = find_source(source, environ, weights=weights)
        path = unpack_gguf(Path(path), environ) if is_lone_gguf(path) else path
        return changed_model(path, source, environ)
    except HubError as exc:
        raise ConfigurationError(f"MODEL {exc}") from exc


def names_of_model(model: str) -> list[str]:
    """Return the names by which clients may request a model if the operator gives it no names: the path or repository
    as it was given, and its last component.

    Clients usually know a model by its repository name, which is the last component of its path.
    """
    folder = Path(model).name
    return [model] if folder in ("", model) else [model, folder]


def unpack_gguf(file: Path, environ: Mapping[str, str]) -> str:
    """Unpack a single GGUF file into a model folder in this user's cache, by `baton unpack`. Return the path to serve
    instead of it.

    Raises `ConfigurationError` if `baton unpack` fails or takes too long.
    """
    folder = gguf_cache_folder(file, environ)
    # A child process unpacks it: transformers, which some files need, would slow down and enlarge this one.
    command = module_command("baton_serve", "unpack", str(file), str(folder))
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=UNPACK_DEADLINE_S)
    except subprocess.TimeoutExpired as exc:
        raise ConfigurationError(
            f"MODEL {file}: `baton unpack` did not end within {UNPACK_DEADLINE_S:.0f} s; is the disk reachable?"
        ) from exc
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
        raise ConfigurationError(f"MODEL {file}: {last}")
    return str(folder / file.name)

"""Finds the model of `baton serve ORG/NAME` in the Hugging Face cache, and unpacks GGUF files. It downloads nothing.

In the cache of huggingface_hub, `models--ORG--NAME/refs/main` contains a commit, and `snapshots/COMMIT` is the model's
folder.
"""

import hashlib
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from baton_serve.child_command import module_command
from baton_serve.services.common.errors import ConfigurationError


def is_lone_gguf(model: str) -> bool:
    """Return whether `model` is a GGUF file without a config.json beside it."""
    file = Path(model)
    return file.suffix == ".gguf" and file.is_file() and not (file.parent / "config.json").is_file()


def unpack_gguf(file: Path, environ: Mapping[str, str]) -> str:
    """Unpack a GGUF file into this user's cache and return the path to serve instead of it.

    Raises `ConfigurationError` if `baton unpack` fails.
    """
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # The digest of the path keeps files of the same name in different folders apart.
    digest = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:16]
    folder = cache / "baton" / "gguf" / digest
    # A child process unpacks it: the GGUF reader and transformers would slow down and enlarge this one.
    command = module_command("baton_serve", "unpack", str(file), str(folder))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
        raise ConfigurationError(f"MODEL {file}: {last}")
    return str(folder / file.name)


_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""The form of a model's name on the hub: ORG/NAME."""


def is_hub_name(model: str) -> bool:
    """Return whether `model` has the form ORG/NAME and is not a path that exists."""
    return _NAME.fullmatch(model) is not None and not Path(model).exists()


def find_snapshot(name: str, environ: Mapping[str, str]) -> Path | None:
    """Return the folder of the branch `main` of a model, or None if it has not been downloaded."""
    folder = _cache(environ) / f"models--{name.replace('/', '--')}"
    try:
        commit = (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None
    found = folder / "snapshots" / commit
    return found if found.is_dir() else None


def _cache(environ: Mapping[str, str]) -> Path:
    """Return the hub's cache folder, by the same variables in the same order as huggingface_hub."""
    if stated := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(stated).expanduser()
    if home := environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"

"""`baton serve ORG/NAME`: the model that `hf download ORG/NAME` has put into the hub's cache. Fetches nothing.

The cache is huggingface_hub's: `models--ORG--NAME/refs/main` names a commit, `snapshots/COMMIT` is the model's folder.
"""

import hashlib
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from baton_serve.child_command import module_command
from baton_serve.services.common.errors import ConfigurationError


def is_lone_gguf(model: str) -> bool:
    file = Path(model)
    return file.suffix == ".gguf" and file.is_file() and not (file.parent / "config.json").is_file()


def unpack_gguf(file: Path, environ: Mapping[str, str]) -> str:
    """The MODEL to serve instead. Raises `ConfigurationError`."""
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:16]
    folder = cache / "baton" / "gguf" / digest
    command = module_command("baton_serve", "unpack", str(file), str(folder))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
        raise ConfigurationError(f"MODEL {file}: {last}")
    return str(folder / file.name)


_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def is_hub_name(model: str) -> bool:
    """Whether it has a hub name's form and is nothing that lies here."""
    return _NAME.fullmatch(model) is not None and not Path(model).exists()


def find_snapshot(name: str, environ: Mapping[str, str]) -> Path | None:
    """The folder of its branch `main`, if it has been downloaded."""
    folder = _cache(environ) / f"models--{name.replace('/', '--')}"
    try:
        commit = (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None
    found = folder / "snapshots" / commit
    return found if found.is_dir() else None


def _cache(environ: Mapping[str, str]) -> Path:
    if stated := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(stated).expanduser()
    if home := environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"

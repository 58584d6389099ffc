"""`baton serve FILE.gguf` where nothing lies beside the file: what it holds becomes a folder of the user's cache.

In a process of its own, which loads what reads such files; this one does not.
"""

import hashlib
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

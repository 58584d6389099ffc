"""`baton serve ORG/NAME`: the model that `hf download ORG/NAME` has put into the hub's cache. Fetches nothing.

The cache is huggingface_hub's: `models--ORG--NAME/refs/main` names a commit, `snapshots/COMMIT` is the model's folder.
"""

import re
from collections.abc import Mapping
from pathlib import Path

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

"""`baton unpack FILE FOLDER`: turns a single GGUF file into a model folder that `baton` commands accept as MODEL.

`baton serve FILE` does the same for a file without a config.json, in the cache of the user.
"""

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from baton_serve.child_command import module_command
from baton_serve.contracts.model_path import gguf_cache_folder
from baton_serve.services.common.errors import ConfigurationError

PROGRAM = "baton unpack"
UNPACK_DEADLINE_S = 600.0
"""Longest time that the child process may take. transformers needs tens of seconds on a busy host."""


def main(argv: Sequence[str]) -> int:
    """Unpack the file and print the MODEL to serve. Return 0, or 1 if it failed."""
    parser = argparse.ArgumentParser(
        PROGRAM,
        description="Write the config, the tokenizer and the chat template of a GGUF file into FOLDER, with a link to"
        " the file, and print the MODEL to serve.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the GGUF file to unpack")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder to write; created if it does not exist")
    options = parser.parse_args(argv)
    if importlib.util.find_spec("gguf") is None:
        sys.stderr.write(f"{PROGRAM}: the Python package gguf is not installed: pip install 'baton-serve[gguf]'\n")
        return 1
    # These imports load numpy and the tokenizer library; `--help` must not wait for them.
    from baton_serve.engine.errors import ModelError
    from baton_serve.engine.loading.gguf_folder import unpack

    try:
        sys.stdout.write(f"{unpack(options.file, options.folder)}\n")
    except ModelError as exc:
        sys.stderr.write(f"{PROGRAM}: {exc}\n")
        return 1
    return 0


def unpack_gguf(file: Path, environ: Mapping[str, str]) -> str:
    """Unpack a GGUF file into this user's cache and return the path to serve instead of it.

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

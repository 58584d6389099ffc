"""`baton save-sharded-state MODEL FOLDER`: writes a checkpoint for `--load-format sharded_state`.

The files are those of vLLM's `examples/offline_inference/save_sharded_state.py`: vLLM reads them as well. No device is
needed, because the weights are divided as they are stored.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from baton_serve.contracts.flag_choices import DtypeName
from baton_serve.model_hub import HubError
from baton_serve.model_source import ModelSource, find_source
from baton_serve.services.common.settings.configuration import environment

PROGRAM = "baton save-sharded-state"
MAX_FILE_SIZE = 5 * 2**30
"""Default of `--max-file-size` in bytes, as in vLLM's script."""


def main(argv: Sequence[str]) -> int:
    """Run `baton save-sharded-state` with these arguments: write the folder and print how to serve it. Return the exit
    status, 1 if it failed.
    """
    options = _parser().parse_args(argv)
    # These imports load torch; `--help` must not wait for it.
    from baton_serve.engine.config import EngineConfig
    from baton_serve.engine.errors import EngineError
    from baton_serve.engine.loading.sharded_saving import save_sharded_state

    try:
        config = EngineConfig(
            model=str(find_source(ModelSource(model=options.model), environment())),
            tensor_parallel_size=options.tensor_parallel_size,
            dtype=options.dtype,
        )
        config.check()
        save_sharded_state(config, options.folder, pattern=options.file_pattern, max_size=options.max_file_size)
    except (EngineError, HubError, OSError) as exc:
        sys.stderr.write(f"{PROGRAM}: {exc}\n")
        return 1
    flags = f"--load-format sharded_state --tensor-parallel-size {options.tensor_parallel_size}"
    sys.stdout.write(f"baton serve {options.folder} {flags}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options, whose names are those of vLLM's script."""
    parser = argparse.ArgumentParser(
        PROGRAM,
        description="Write the weights of MODEL into FOLDER as each tensor-parallel rank needs them, with config and"
        " tokenizer, and print the command that serves the folder.",
    )
    parser.add_argument("model", metavar="MODEL", help="model folder, or ORG/NAME on the Hugging Face hub")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder to write; it must not have weights")
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1, metavar="N", help="ranks (default: 1)")
    parser.add_argument(
        "--dtype", choices=get_args(DtypeName), default="auto", help="data type of the files (default: that of MODEL)"
    )
    parser.add_argument("--file-pattern", metavar="NAME", help="names of the files, with {rank} and {part}")
    parser.add_argument(
        "--max-file-size", type=int, default=MAX_FILE_SIZE, metavar="BYTES", help="size of a file (default: 5 GiB)"
    )
    return parser

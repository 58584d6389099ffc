"""Proves the kernels for a model's shapes, in the child process of `model_kernel_table.py`.

`model_kernel_table` runs this module in a child process with a deadline, because a broken driver may hang or crash it.
The argument is the folder of a model, whose config states the shapes; without one they are those of an 8B model.
"""

import logging
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from baton_serve.engine.device import defaults, select_device
from baton_serve.engine.execution.kernel_shapes import shapes_of_config
from baton_serve.engine.kernels.interfaces import AttentionSpec
from baton_serve.engine.kernels.operations import WHOLE_ROW, ProofShapes, WeightFormat
from baton_serve.engine.kernels.proved_kernels import prove_kernels
from baton_serve.engine.kernels.selection import kernel_candidates

DTYPE = torch.bfloat16
FORMATS = (
    WeightFormat("int4", 128, DTYPE, has_zeros=False),
    WeightFormat("int8", WHOLE_ROW, DTYPE, has_zeros=False),
)
"""The formats of `--quantization` that are proved beside plain weights."""
EXAMPLE = ProofShapes(
    dtype=DTYPE,
    hidden=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    num_planes=2,
    block_tokens=16,
    scale_rows=0,
    cache_dtype=DTYPE,
    vocab_size=128256,
    specs=(AttentionSpec(128**-0.5), AttentionSpec(128**-0.5, sliding_window=48)),
)


def main(arguments: list[str]) -> int:
    """Prove the kernels for the shapes of a model (compare each with plain torch) and print the verdicts as JSON. The
    first of `arguments` is the model's folder; without it the shapes are those of an 8B model. Return the exit status:
    2 if the model's config cannot be read, otherwise 0.
    """
    device = select_device("auto")
    block_tokens = defaults(device).block_tokens
    shapes = replace(EXAMPLE, block_tokens=block_tokens)
    if arguments and arguments[0]:
        try:
            shapes = shapes_of_config(Path(arguments[0]), DTYPE, block_tokens)
        except (OSError, ValueError, KeyError) as exc:
            sys.stderr.write(f"the shapes of {arguments[0]} cannot be read: {type(exc).__name__}: {exc}\n")
            return 2
    shapes = replace(shapes, formats=FORMATS)
    # The parent process reports what is wrong.
    logging.getLogger("baton_serve").setLevel(logging.ERROR)
    kernels = prove_kernels(kernel_candidates(device, DTYPE), shapes, device, folder=None, is_timed=True)
    sys.stdout.buffer.write(msgspec.json.encode(kernels.verdicts) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

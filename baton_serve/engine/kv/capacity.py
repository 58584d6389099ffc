"""Computes how many KV blocks fit into the memory, whether a request of `max_model_len` fits, and `max_num_seqs` with
recurrent states. Only arithmetic and messages.
"""

import logging
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from baton_serve.contracts.block_layout import DTYPE_BYTES, KVLayout
from baton_serve.engine import device as devices
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.errors import CapacityError

logger = logging.getLogger(__name__)

MAX_STATES_RATIO = 0.5
"""Largest part of the KV cache's memory for the recurrent states of running sequences."""
SEQUENCES_PER_SPARE_ROW, MAX_SPARE_ROWS = 8, 8
"""There is a spare row of states for so many sequences, and at most so many of them. Steps begin few prompts each."""
TOKENS_PER_SPARE_ROW = 1024
"""Steps of many tokens begin more prompts: for each such number of tokens in a step there is also a spare row, for half
of the sequences at most."""
MIN_ROWS_PER_SPARE_ROW = 16
"""So many rows contain one spare row, if memory for more is missing: running sequences need it more."""


class StateRows(NamedTuple):
    """How many sequences may run, and how many spare rows of recurrent states their steps have for inner
    checkpoints."""

    max_num_seqs: int
    num_spare: int


def cache_bytes(config: EngineConfig, device: torch.device, activation_bytes: int) -> int:
    """Return how many bytes the KV cache may use on `device`: the number in the settings, or else the memory that is
    left when the weights are loaded (call it then). `activation_bytes` is what the largest step needs in addition."""
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes
    return devices.kv_cache_bytes(
        device, memory_utilization=config.gpu_memory_utilization, activation_bytes=activation_bytes
    )


def count_blocks(layout: KVLayout, available_bytes: int, override: int | None) -> int:
    """Return how many KV blocks requests can use: as many as fit into `available_bytes`, without block 0, to which
    padding is written. If `override` is set, it is instead the number of blocks that would hold the KV of all layers.
    """
    if override is not None:
        return override * layout.num_groups
    return max(0, available_bytes // layout.block_bytes - 1)


def limit_sequences(config: EngineConfig, layout: KVLayout, device: torch.device) -> StateRows:
    """Return `config.max_num_seqs`, or fewer if the recurrent states of that number of sequences would need more than
    half of the KV cache's memory, with the number of spare rows. Call it when the weights are loaded. Raises
    `CapacityError` if not even one sequence fits."""
    wanted = config.max_num_seqs
    if not layout.state_bytes:
        return StateRows(wanted, 0)
    # Weights may take more than their share of a device's memory; then nothing is left.
    available = max(0, cache_bytes(config, device, 0))
    if config.num_gpu_blocks_override is not None:
        available = max(available, config.num_gpu_blocks_override * layout.block_bytes * 2)
    row = layout.state_blocks * layout.block_bytes
    fitting = int(available * MAX_STATES_RATIO) // row
    if not fitting:
        raise CapacityError(
            f"the recurrent states of one sequence need {_gib(row)}, more than half of the {_gib(available)} for the KV"
            " cache: give it more memory (kv_cache_memory_bytes; on accelerators gpu_memory_utilization)"
        )
    spare = 0
    if config.enable_prefix_caching:  # inner checkpoints are saved to it
        of_tokens = min(wanted // 2, (config.max_num_batched_tokens or 0) // TOKENS_PER_SPARE_ROW)
        spare = max(of_tokens, min(MAX_SPARE_ROWS, -(-wanted // SEQUENCES_PER_SPARE_ROW)))
    spare = min(spare, max(fitting - wanted, fitting // MIN_ROWS_PER_SPARE_ROW))
    allowed = min(wanted, fitting - spare)
    if allowed < wanted:
        logger.warning(
            "max_num_seqs is lowered from %d to %d: the recurrent states of one sequence need %s",
            wanted,
            allowed,
            _gib(row),
        )
    return StateRows(allowed, spare)


def check_host(num_bytes: int, *, free_bytes: int, total_bytes: int) -> None:
    """Check that the host has memory for a KV cache of `num_bytes`. Raises `CapacityError` if it is larger than the
    whole memory, and logs a warning if it is larger than the free memory.

    Linux grants any size at first, and kills the process later when the memory is used.
    """
    if num_bytes > total_bytes:
        raise CapacityError(
            f"a KV cache of {_gib(num_bytes)} is more than the memory of this machine or container"
            f" ({_gib(total_bytes)}): lower kv_cache_memory_bytes, or do not set it"
        )
    if num_bytes > free_bytes:
        logger.warning(
            "the KV cache may grow to %s, but only %s of memory are free: the kernel may kill this process",
            _gib(num_bytes),
            _gib(free_bytes),
        )


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """The size of the model's weights on one device, and the number of devices over which the model is divided."""

    num_bytes: int
    """Size in bytes of the weights that are not quantized."""
    num_ranks: int = 1


@dataclass(frozen=True, slots=True)
class GroupedSequence:
    """The needs of one sequence if the layers are divided into cache groups."""

    longest: int
    """Tokens of the longest sequence that fits."""
    num_blocks: int
    """Blocks of a sequence of `max_model_len` tokens."""


def check_fit(
    layout: KVLayout,
    num_usable: int,
    max_model_len: int,
    weights: DeviceWeights | None = None,
    grouped: GroupedSequence | None = None,
) -> None:
    """Log how many tokens and requests a KV cache of `num_usable` blocks holds. `weights` describes the weights that
    are on the same accelerator; None: the cache is in host memory. `grouped` has the needs of a sequence of a model
    with cache groups.

    Raises `CapacityError` if one request of `max_model_len` tokens does not fit. Its message names settings with which
    it would.
    """
    # A prompt may begin with the blocks of one checkpoint and end with those of another one.
    num_states = 2 * layout.state_blocks + layout.source_blocks
    longest = max(0, num_usable - num_states) * layout.block_tokens
    num_needed = -(-max_model_len // layout.block_tokens) + num_states
    if grouped is not None:
        longest, num_needed = grouped.longest, grouped.num_blocks
    if longest < max_model_len:
        needed = num_needed * layout.block_bytes
        raise CapacityError(
            f"one request of max_model_len ({max_model_len} tokens) needs {_gib(needed)} of KV cache, but"
            f" {_gib(num_usable * layout.block_bytes)} are available. "
            # The message ends in what can be done; a length of 0 cannot be proposed.
            + (f"The largest max_model_len that fits is {longest}: set it, or give" if longest else "Give")
            + " the KV cache more memory (kv_cache_memory_bytes; on accelerators gpu_memory_utilization)"
            + "".join(f"; or {way}" for way in _other_ways(layout, needed, num_usable * layout.block_bytes, weights))
        )
    tokens = longest if grouped is None else num_usable * max_model_len // num_needed
    logger.info(
        "KV cache: %d blocks of %d tokens = %d tokens (%s); at %d tokens per request %.1f requests at once",
        num_usable,
        layout.block_tokens,
        tokens,
        _gib(num_usable * layout.block_bytes),
        max_model_len,
        tokens / max_model_len,
    )


def _other_ways(layout: KVLayout, needed: int, available: int, weights: DeviceWeights | None) -> list[str]:
    """Return changes of settings, as text for an error message, with which a request that needs `needed` bytes of KV
    blocks would fit: other formats of KV or weights, or more devices. `available` bytes are there now. `weights` None:
    the cache is in host memory, and only the KV's format counts."""
    ways: list[str] = []
    wide = DTYPE_BYTES[layout.dtype]
    # Scales take a little more than half; one block of them is left as reserve.
    if wide > 1 and needed / wide + layout.block_bytes <= available:
        ways.append("set kv_cache_dtype fp8")
    if weights is None:
        return ways
    # Each rank holds its share of all weights and of each block.
    whole = weights.num_bytes * weights.num_ranks
    if available + whole / 2 >= needed and weights.num_bytes:
        ways.append("set quantization fp8")
    if available + whole > 0:
        count = -(-(whole + needed) * weights.num_ranks // (whole + available))
        ways.append(f"divide the model over {count} such devices (pipeline_parallel_size)")
    missing = needed - available
    if 4 * missing < 3 * weights.num_bytes:  # two layers stay as buffers
        ways.append(f"set cpu_offload_gb {math.ceil(10 * missing / (1 << 30)) / 10:g}, which is slower")
    return ways


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB" if num_bytes >= 1 << 27 else f"{num_bytes / (1 << 20):.2f} MiB"

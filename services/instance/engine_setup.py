"""Builds the engine from the settings, with a progress bar for a human who waits."""

import sys

import torch
from tqdm import tqdm

from engine import Engine, EngineConfig
from services.instance.settings import InstanceSettings

DEFAULT_NUM_SEQS = 256


def engine_config(settings: InstanceSettings) -> EngineConfig:
    num_seqs = settings.max_num_seqs
    if num_seqs is None:
        num_seqs = min(DEFAULT_NUM_SEQS, settings.max_num_batched_tokens or DEFAULT_NUM_SEQS)
    return EngineConfig(
        model=settings.model,
        device=settings.device,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        kv_cache_bytes=settings.kv_cache_memory_bytes,
        block_size=settings.block_size,
        num_gpu_blocks_override=settings.num_gpu_blocks_override,
        seed=settings.seed,
        enable_prefix_caching=settings.enable_prefix_caching,
        load_format=settings.load_format,
        enforce_eager=settings.enforce_eager,
        async_scheduling=settings.async_scheduling,
        trust_remote_code=settings.trust_remote_code,
        max_logprobs=settings.max_logprobs,
    )


def build_engine(settings: InstanceSettings) -> Engine:
    """Called in the engine's thread. Raises `engine.errors.EngineError`."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    with ProgressBar() as progress:
        return Engine(engine_config(settings), progress=progress)


class ProgressBar:
    """Shown on a terminal only, gone when the engine is ready."""

    def __init__(self) -> None:
        self._bar = tqdm(
            total=100.0,
            desc="loading",
            leave=False,
            disable=not sys.stderr.isatty(),
            bar_format="{desc:<28} {bar} {n:3.0f} % {elapsed}",
        )

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.close()

    def __call__(self, what: str, fraction: float) -> None:
        self._bar.set_description(what, refresh=False)
        self._bar.n = 100.0 * fraction
        self._bar.refresh()

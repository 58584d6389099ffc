"""Builds the engine from an instance's settings, decides the default `max_num_seqs`, and shows the progress of
loading.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf

import torch
from tqdm import tqdm

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.instance import Role
from baton_serve.contracts.model_path import model_folder
from baton_serve.engine import Engine, EngineConfig
from baton_serve.engine.core.step_time_model import DECODE_MAX_STRETCH
from baton_serve.engine.parallel.ranks import RemoteRanks
from baton_serve.engine.pooling.encode_engine import EncodeObserver, ImageEncoder
from baton_serve.engine.pooling.engine import PoolingEngine
from baton_serve.engine.pooling.model_kind import ModelKind, detect_model_kind
from baton_serve.kvtransfer import HostMemory
from baton_serve.model_source import allowed_plugins
from baton_serve.services.common.settings.configuration import environment
from baton_serve.services.instance.cpu_sharing.cpu_affinity import pin_to_cores, renice_threads
from baton_serve.services.instance.rank_transfers import RANK_PROGRAM
from baton_serve.services.instance.settings import InstanceSettings

logger = logging.getLogger(__name__)

DEFAULT_NUM_SEQS = 256
"""Default of `--max-num-seqs`, as in vLLM."""


def _keeps_all_kv(settings: InstanceSettings, role: Role) -> bool:
    """Return whether each block holds the KV of all layers."""
    if settings.disable_hybrid_kv_cache_manager is not None:
        return settings.disable_hybrid_kv_cache_manager
    # Blocks of cache groups cannot be converted for instances with another block size or data type.
    return role != "unified"


def engine_config(settings: InstanceSettings, role: Role) -> EngineConfig:
    """Return the configuration of the engine for an instance with these settings and this role."""
    num_seqs = settings.max_num_seqs
    if num_seqs is None:
        # A step has at least one token per running sequence, so more sequences than tokens are useless.
        num_seqs = min(DEFAULT_NUM_SEQS, settings.max_num_batched_tokens or DEFAULT_NUM_SEQS)
    return EngineConfig(
        model=settings.model,
        device=settings.device,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        allow_long_max_model_len=settings.allow_long_max_model_len,
        disable_sliding_window=settings.disable_sliding_window,
        disable_hybrid_kv_cache_manager=_keeps_all_kv(settings, role),
        max_num_seqs=num_seqs,
        tensor_parallel_size=settings.tensor_parallel_size,
        pipeline_parallel_size=settings.pipeline_parallel_size,
        pipeline_layer_partition=settings.pipeline_layer_partition,
        nnodes=settings.nnodes,
        enable_expert_parallel=settings.enable_expert_parallel,
        disable_custom_all_reduce=settings.disable_custom_all_reduce,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        kv_cache_bytes=settings.kv_cache_memory_bytes,
        cpu_offload_gb=settings.cpu_offload_gb,
        host_kv_bytes=int(settings.host_kv_gb * (1 << 30)),
        block_size=settings.block_size,
        num_gpu_blocks_override=settings.num_gpu_blocks_override,
        seed=settings.seed,
        enable_prefix_caching=settings.enable_prefix_caching,
        load_format=settings.load_format,
        plugins=allowed_plugins(environment()),
        model_loader_extra_config=settings.model_loader_extra_config,
        enforce_eager=settings.enforce_eager,
        quantization=settings.quantization,
        fp8_dtype=settings.fp8_dtype,
        quantization_group_size=settings.quantization_group_size,
        quantization_skip=tuple(name.strip() for name in settings.quantization_skip.split(",") if name.strip()),
        kv_cache_dtype=settings.kv_cache_dtype,
        tail_parts=settings.kv_tail_parts,
        # Prompts normally run on prefill instances. A prompt on a decode instance must not slow down decoding sequences
        # much, even if they have no ITL SLO.
        max_step_stretch=DECODE_MAX_STRETCH if role == "decode" else inf,
        async_scheduling=settings.async_scheduling,
        trust_remote_code=settings.trust_remote_code,
        max_logprobs=settings.max_logprobs,
        runner=settings.runner,
        task=settings.task,
        enable_lora=settings.enable_lora,
        lora_modules=tuple(settings.lora_modules),
        lora_dtype=settings.lora_dtype,
        max_loras=settings.max_loras,
        max_lora_rank=settings.max_lora_rank,
        max_cpu_loras=settings.max_cpu_loras,
        reads_images=role != "decode",
    )


def model_kind(settings: InstanceSettings) -> ModelKind:
    """Return what the model of the settings computes: `generate` (text), `embed` or `classify` (vectors). Raises
    `engine.errors.ConfigError` if that cannot be found or `--task` contradicts the model.
    """
    return detect_model_kind(model_folder(settings.model), runner=settings.runner, task=settings.task)


def build_engine(
    settings: InstanceSettings,
    role: Role,
    on_lost: Callable[[str], None],
    weights_version: str = "",
    remote: RemoteRanks | None = None,
) -> Engine:
    """Load the model and build the engine of a model that generates text. Call it in the engine thread.

    `on_lost` is called from another thread with the reason if the engine cannot continue. `weights_version`
    distinguishes replaced weights of the same model. `remote` connects the ranks on other hosts. Raises
    `engine.errors.EngineError` if the model cannot be loaded.
    """
    _set_threads(settings)
    config = replace(engine_config(settings, role), weights_version=weights_version)
    program = RANK_PROGRAM if settings.kv_rank_transfers == "auto" else None
    with ProgressBar() as progress:
        engine = Engine(config, progress=progress, on_lost=on_lost, remote=remote, rank_program=program)
    renice_threads(settings)
    return engine


def build_pooling_engine(
    settings: InstanceSettings, role: Role, kind: ModelKind, on_lost: Callable[[str], None]
) -> PoolingEngine:
    """Load the model and build the engine of a model that computes vectors, such as embeddings. Call it in the engine
    thread. `on_lost` is called from another thread with the reason if the engine cannot continue.

    Raises `engine.errors.EngineError` if the model cannot be loaded.
    """
    _set_threads(settings)
    with ProgressBar() as progress:
        engine = PoolingEngine(engine_config(settings, role), kind, progress=progress, on_lost=on_lost)
    renice_threads(settings)
    return engine


def build_image_encoder(settings: InstanceSettings, counter: EncodeObserver, weights_version: str) -> ImageEncoder:
    """Build the engine of an encode instance. Call it in the engine thread. Raises `engine.errors.EngineError`."""
    _set_threads(settings)
    config = replace(engine_config(settings, "encode"), weights_version=weights_version)

    def blocks(layout: KVLayout) -> HostMemory:
        count = max(1, int(settings.embedding_cache_gb * (1 << 30)) // layout.block_bytes)
        count = max(1, int(settings.embedding_cache_gb * (1 << 30)) // layout.block_bytes)
        # The block pool leaves out the first block.
        return HostMemory(1 + count, layout.block_bytes)

    with ProgressBar() as progress:
        encoder = ImageEncoder(config, blocks, observer=counter, progress=progress)
    renice_threads(settings)
    return encoder


def _set_threads(settings: InstanceSettings) -> None:
    """Bind the calling thread, which is the engine thread, to its CPU cores, and set torch's number of threads."""
    pin_to_cores(settings)
    # OMP_NUM_THREADS has no effect in a process that was forked after torch had read it, so torch gets the number
    # again.
    count = str(settings.threads or environment().get("OMP_NUM_THREADS", ""))
    if count.isdecimal():
        torch.set_num_threads(int(count))


_REPORT_INTERVAL_S = 5.0
"""Time between two log lines about the progress of loading."""


class ProgressBar:
    """Shows the progress of loading a model: as a bar on a terminal, which disappears at the end, and as log lines
    otherwise.

    A thread writes the lines, because stages such as the build of kernels take minutes without reporting a fraction.
    The debug log records when each stage began.
    """

    def __init__(self, *, interval_s: float = _REPORT_INTERVAL_S) -> None:
        """Show nothing yet. `interval_s` is the time between two log lines in seconds."""
        self._interval_s = interval_s
        self._stage, self._fraction = "", 0.0
        self._began_at = time.monotonic()
        self._has_ended = threading.Event()
        self._reporter: threading.Thread | None = None
        self._bar = tqdm(
            total=100.0,
            desc="loading",
            leave=False,
            disable=not sys.stderr.isatty(),
            bar_format="{desc:<28} {bar} {n:3.0f} % {elapsed}",
        )

    def __enter__(self) -> "ProgressBar":
        if self._bar.disable:
            self._reporter = threading.Thread(target=self._report_regularly, name="loading progress", daemon=True)
            self._reporter.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._has_ended.set()
        if self._reporter is not None:
            self._reporter.join()
        self._bar.close()

    def __call__(self, stage: str, fraction: float) -> None:
        if stage != self._stage:
            logger.debug("start: %s", stage)
        self._stage, self._fraction = stage, fraction
        self._bar.set_description(stage, refresh=False)
        self._bar.n = 100.0 * fraction
        self._bar.refresh()

    def _report_regularly(self) -> None:
        while not self._has_ended.wait(self._interval_s):
            share = f", {100.0 * self._fraction:.0f} %" if self._fraction else ""
            logger.info(
                "%s%s, %.0f s since the start", self._stage or "loading", share, time.monotonic() - self._began_at
            )

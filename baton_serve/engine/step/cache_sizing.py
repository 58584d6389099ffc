"""Decides the number of KV blocks: measures the largest step, takes the memory that is left, and allocates cache and
host tier.
"""

from dataclasses import replace

import torch

from baton_serve.engine import device as devices
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.core.host_tier import HostTier
from baton_serve.engine.errors import ConfigError
from baton_serve.engine.execution.engine_setup import EngineSetup
from baton_serve.engine.execution.executor import LocalExecutor
from baton_serve.engine.execution.runner import ModelRunner
from baton_serve.engine.kv import capacity
from baton_serve.engine.kv.host_blocks import HostTierMemory
from baton_serve.engine.kv.kv_cache import KVCache, KVMemoryKind
from baton_serve.engine.kv.state_memory import StateMemory, make_states
from baton_serve.engine.parallel.commands import MeasureMemory
from baton_serve.engine.parallel.ranks import Ranks
from baton_serve.engine.parallel.tp_executor import TPHostSlots, make_executor
from baton_serve.engine.sample.token_masks import TokenMasker
from baton_serve.engine.step.warm_up import run_warm_up_batch

SAMPLER_COPIES = 6
"""Number of float32 copies of a batch's logits that exist at the same time while all sampling options are used."""


class KVCacheBuilder:
    """Decides how many KV blocks fit into the memory, and allocates the KV cache, the recurrent states and the host
    tier. The engine uses it once, while it starts."""

    def __init__(
        self, config: EngineConfig, setup: EngineSetup, device: torch.device, ranks: Ranks, *, vocab_size: int
    ) -> None:
        self._config = config
        self._forward = setup.forward
        self._layout = setup.layout
        self._limits = setup.limits
        self._states = setup.states
        self._setup = setup
        self._device = device
        self._ranks = ranks
        self._vocab_size = vocab_size

    def count_blocks(self, masking: TokenMasker) -> int:
        """Return how many KV blocks requests can use, without block 0 (padding). If no setting states it, run the
        largest possible step to measure the memory that it needs; `masking` is what this step's sampling uses.

        Raises `CapacityError` if a KV cache in host memory is larger than the whole memory.
        """
        config, override = self._config, self._config.num_gpu_blocks_override
        if override is not None:
            return capacity.count_blocks(self._layout, 0, override)
        if devices.is_host(self._device):  # one memory holds all ranks' blocks
            available = capacity.cache_bytes(config, self._device, 0)
            memory = devices.memory(self._device)
            capacity.check_host(available, free_bytes=memory.free_bytes, total_bytes=memory.total_bytes)
        elif config.kv_cache_bytes is not None:
            available = self._whole_bytes([config.kv_cache_bytes] * self._ranks.num_ranks)
        else:
            available = self._whole_bytes(self._measure(masking))
        rows = self._limits.num_state_rows * self._layout.state_blocks * self._layout.block_bytes
        return capacity.count_blocks(self._layout, available - rows, None)

    def check_fit(self, num_usable: int, max_model_len: int) -> None:
        """Log how many tokens and requests fit into `num_usable` KV blocks. Raises `CapacityError` if one request of
        `max_model_len` tokens does not; its message names settings with which it would."""
        weights: capacity.DeviceWeights | None = None
        # In host memory the weights take nothing from the cache.
        if not devices.is_host(self._device):
            weights = capacity.DeviceWeights(self._setup.weight_bytes, self._ranks.num_ranks)
        grouped: capacity.GroupedSequence | None = None
        if self._limits.layer_groups:
            longest, needed = self._limits.num_tokens_alone(num_usable), self._limits.num_blocks_alone(max_model_len)
            grouped = capacity.GroupedSequence(longest, needed)
        capacity.check_fit(self._layout, num_usable, max_model_len, weights, grouped)

    def make_states(self, cache: KVCache) -> StateMemory:
        """Allocate the recurrent states of all batch slots, and the spare rows. `cache` holds their checkpoints."""
        return make_states(self._states, self._limits.num_state_rows, cache, self._setup.first_state)

    def make(self, num_blocks: int) -> KVCache:
        """Allocate the KV cache with this number of blocks, on all ranks. If it is in host memory, or has a mirror
        there, the ranks of one host share one memory."""
        # Ranks on several hosts have no common memory, so each has its part for itself, and rank 0 the mirror.
        place: KVMemoryKind | None = "mirrored" if self._config.nnodes > 1 else None
        cache = KVCache(self._layout, num_blocks, self._device, part=self._setup.part, place=place)
        self._ranks.build(cache, self._limits.max_num_seqs, self._limits.num_spare_rows)
        return cache

    def make_host_tier(self, cache: KVCache) -> HostTierMemory:
        """Allocate the host tier, `host_kv_bytes` of host memory for evicted KV blocks, on all ranks together; 0: it
        never stores any. Raises `ConfigError` if that is less than one block."""
        num_bytes = self._config.host_kv_bytes
        if not num_bytes:
            return HostTierMemory(cache, None)
        is_divided = cache.is_mirrored and self._ranks.num_ranks > 1
        # Ranks that hold the same KV heads keep them several times.
        copies = max(1.0, self._setup.block_share * self._ranks.place.shard.size) if is_divided else 1
        slot_bytes = round(cache.block_bytes * copies)
        num_slots = num_bytes // slot_bytes
        if not num_slots:
            raise ConfigError(f"host_kv_bytes is {num_bytes}, less than one block of {slot_bytes} bytes")
        return HostTierMemory(cache, HostTier(num_slots), TPHostSlots(self._ranks, num_slots) if is_divided else None)

    def _whole_bytes(self, available: list[int]) -> int:
        """Return how many bytes of KV blocks fit in all, if rank `i` has `available[i]` bytes for its part of each
        block."""
        size, shares = self._ranks.place.shard.size, self._setup.stage_shares()
        # All ranks have the same number of blocks, so the one with the least room for its part decides.
        every = ((num_bytes, shares[rank // size]) for rank, num_bytes in enumerate(available))
        least = min(num_bytes / share for num_bytes, share in every if share)
        return int(least / self._setup.block_share)

    def _bytes_in_flight(self, num_tokens: int) -> int:
        """Return the size of the activations of `num_tokens` tokens, or of encoder outputs, that are sent and received
        while a stage of a pipeline computes another step; 0 without a pipeline."""
        sources = self._setup.sources
        num_rows = max(num_tokens, 0 if sources is None else sources.max_rows)
        return 0 if self._ranks.links is None else self._ranks.links.waiting_bytes(num_rows)

    def _measure(self, masking: TokenMasker) -> list[int]:
        """Run the largest possible step. Return, by rank, how many bytes are left for the KV cache beside the weights
        and what that step needs."""
        tokens = self._limits.max_step_tokens
        # Stages divide prompts into smaller steps, and this one is the largest.
        limits = replace(self._limits, num_stages=1, max_num_batched_tokens=tokens)
        # A small cache that holds the prompts of the largest step, and one block more for each sequence to grow.
        num_blocks = 2 + (-(-tokens // self._layout.block_tokens) + self._limits.max_num_seqs) * self._layout.num_groups
        cache = self.make(num_blocks)
        before = devices.reset_peak(self._device)
        states = self.make_states(cache).views
        own = LocalExecutor(self._forward, cache, self._limits, states)
        executor = make_executor(own, self._forward, self._ranks, self._vocab_size)
        run_warm_up_batch(ModelRunner(executor, limits, self._device, masking), num_blocks, limits, tokens)
        used = devices.peak_bytes(self._device) - before
        cache.close()
        # Drop the executor's views, or the small cache would count as used memory.
        del executor, own
        # Graphs keep scratch memory of their own, which cannot be measured before the cache exists; a decode step needs
        # less than the largest step.
        measure = MeasureMemory(
            work_factor=2 if self._setup.uses_graphs else 1,
            extra_bytes=SAMPLER_COPIES * 4 * limits.max_num_seqs * self._vocab_size + self._bytes_in_flight(tokens),
        )
        activation = used * measure.work_factor + measure.extra_bytes
        return self._ranks.available_bytes(capacity.cache_bytes(self._config, self._device, activation), measure)

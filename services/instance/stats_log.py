"""Decides how often an instance logs throughput, running requests and KV cache usage, and when it warns of
preemptions.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from baton_serve.services.common.process_lifecycle import Lifecycle, cancel_all
from baton_serve.services.instance.interfaces import EngineStats
from baton_serve.services.instance.settings.handoff_network_cpu import NetworkSettings

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0
"""Time between two lines, as in vLLM."""


def log_stats(
    settings: NetworkSettings, stats: Callable[[], EngineStats], lifecycle: Lifecycle, *, interval_s: float = INTERVAL_S
) -> None:
    """Log the throughput and load that `stats` returns every `interval_s` seconds until the process stops, unless
    `--disable-log-stats` is given.
    """
    if settings.disable_log_stats:
        return
    stats_log = StatsLog(stats)
    stats_log.start(interval_s)
    lifecycle.on_stop("stats log", stats_log.close)


class StatsLog:
    """Logs the throughput and load of one engine regularly, from `start` to `close`, on the event loop. While the
    engine is idle it logs nothing.
    """

    def __init__(self, stats: Callable[[], EngineStats], *, now: Callable[[], float] = time.monotonic) -> None:
        self._stats, self._now = stats, now
        self._last, self._last_at = stats(), now()
        self._task: asyncio.Task[None] | None = None

    def start(self, interval_s: float = INTERVAL_S) -> None:
        """Start a task that calls `log` every `interval_s` seconds."""
        self._task = asyncio.get_running_loop().create_task(self._log_for_ever(interval_s))

    async def close(self) -> None:
        """Stop logging: cancel the task that `start` has started and wait for its end."""
        if self._task is not None:
            await cancel_all([self._task])

    def log(self) -> None:
        """Log the tokens per second since the last call and the present load, unless nothing runs and nothing was
        computed. Warn if sequences were preempted.
        """
        stats, last, now = self._stats(), self._last, self._now()
        seconds = max(now - self._last_at, 1e-3)
        self._last, self._last_at = stats, now
        if preempted := stats.preemptions - last.preemptions:
            logger.warning(
                "%d sequences were preempted, because too few KV blocks were free; they are computed again, which costs"
                " time (%d preemptions since the start). Give the KV cache more memory or lower --max-num-seqs",
                preempted,
                stats.preemptions,
            )
        prompt_tokens, generated = (
            stats.prompt_tokens - last.prompt_tokens,
            stats.generated_tokens - last.generated_tokens,
        )
        if not (prompt_tokens or generated or stats.running or stats.waiting):
            return
        # Pooling engines have no blocks, and before the first prompt nothing was looked up in the cache.
        used = 1 - stats.free_blocks / stats.total_blocks if stats.total_blocks else 0.0
        hits = stats.prefix_hit_tokens / stats.prefix_query_tokens if stats.prefix_query_tokens else 0.0
        logger.info(
            "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs,"
            " Waiting: %d reqs, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%",
            prompt_tokens / seconds,
            generated / seconds,
            stats.running,
            stats.waiting,
            100 * used,
            100 * hits,
        )

    async def _log_for_ever(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            self.log()

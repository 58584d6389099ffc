"""The periodic line about an instance's load."""

import asyncio
import logging
from dataclasses import replace

import pytest

from baton_serve.services.common.process_lifecycle import Lifecycle
from baton_serve.services.common.settings.configuration import load
from baton_serve.services.instance import stats_log
from baton_serve.services.instance.interfaces import EngineStats
from baton_serve.services.instance.settings import InstanceSettings
from baton_serve.services.instance.stats_log import StatsLog
from tests.unit.instance.fakes import STATS


def test_a_line_has_the_rates_since_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    seen = [replace(STATS, total_blocks=100, free_blocks=100)]
    clock = [5.0]
    log = StatsLog(lambda: seen[-1], now=lambda: clock[0])
    clock[0] = 15.0
    seen.append(
        replace(
            STATS,
            total_blocks=100,
            free_blocks=75,
            running=3,
            waiting=2,
            prompt_tokens=1000,
            generated_tokens=250,
            prefix_query_tokens=1000,
            prefix_hit_tokens=400,
        )
    )
    with caplog.at_level(logging.INFO, logger=stats_log.__name__):
        log.log()
    assert caplog.messages == [
        "Avg prompt throughput: 100.0 tokens/s, Avg generation throughput: 25.0 tokens/s, Running: 3 reqs,"
        " Waiting: 2 reqs, KV cache usage: 25.0%, Prefix cache hit rate: 40.0%"
    ]


def test_an_idle_instance_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    stats = replace(STATS, prompt_tokens=7, generated_tokens=7)
    log = StatsLog(lambda: stats)
    with caplog.at_level(logging.INFO, logger=stats_log.__name__):
        log.log()
    assert not caplog.messages


def test_preemptions_are_a_warning_with_a_remedy(caplog: pytest.LogCaptureFixture) -> None:
    seen = [replace(STATS, preemptions=1)]
    log = StatsLog(lambda: seen[-1])
    seen.append(replace(STATS, preemptions=4))
    with caplog.at_level(logging.WARNING, logger=stats_log.__name__):
        log.log()
        log.log()
    (message,) = caplog.messages
    assert message.startswith("3 sequences were preempted") and "4 preemptions since the start" in message
    assert "--max-num-seqs" in message


def test_the_flag_turns_the_lines_off() -> None:
    def seen_by(*flags: str) -> int:
        """Return how often the statistics were read while a process served with these flags."""
        calls = 0
        settings = load(InstanceSettings, ["m", *flags], {}, prefix="BATON__DECODE__", program="", description="")

        async def scenario() -> None:
            logged = asyncio.Event()

            def stats() -> EngineStats:
                nonlocal calls
                calls += 1
                if calls > 1:
                    logged.set()
                return STATS

            lifecycle = Lifecycle()
            stats_log.log_stats(settings, stats, lifecycle, interval_s=0.001)
            if calls:
                await asyncio.wait_for(logged.wait(), 10)
            await lifecycle.stop_all()

        asyncio.run(scenario())
        return calls

    assert seen_by() > 1
    assert seen_by("--disable-log-stats") == 0

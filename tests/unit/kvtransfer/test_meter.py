"""The speed of a connection."""

from baton_serve.kvtransfer.consumer.link import ThroughputMeter

MIB = 1 << 20


def test_only_time_with_bytes_outstanding_counts() -> None:
    meter = ThroughputMeter()
    meter.announced(4 * MIB, 0.0)
    meter.delivered(4 * MIB, 1.0)
    meter.announced(4 * MIB, 100.0)
    meter.delivered(4 * MIB, 101.0)
    assert meter.bytes_per_second == 4 * MIB


def test_overlapping_announcements_are_one_busy_time() -> None:
    meter = ThroughputMeter()
    meter.announced(4 * MIB, 0.0)
    meter.announced(4 * MIB, 0.5)
    meter.delivered(4 * MIB, 1.0)
    assert meter.bytes_per_second == 0.0
    meter.delivered(4 * MIB, 2.0)
    assert meter.bytes_per_second == 4 * MIB


def test_small_transfers_do_not_hide_the_speed_of_large_ones() -> None:
    meter = ThroughputMeter()
    meter.announced(1000, 0.0)
    meter.delivered(1000, 1.0)
    assert meter.bytes_per_second == 1000
    meter.announced(8 * MIB, 2.0)
    meter.delivered(8 * MIB, 3.0)
    meter.announced(1000, 4.0)
    meter.delivered(1000, 5.0)
    assert meter.bytes_per_second == 8 * MIB

"""How fast a connection delivers: bytes over the time in which any were outstanding, not that spent on prefill."""

EMA_WEIGHT = 0.3
MIN_SAMPLE_BYTES = 1 << 20
"""Less than this tells of latency, not of speed; it counts only until something larger came."""


class ThroughputMeter:
    def __init__(self) -> None:
        self.bytes_per_second = 0.0
        self._outstanding = 0
        self._delivered = 0
        self._busy_since = 0.0
        self._best_sample = 0

    def announced(self, num_bytes: int, now: float) -> None:
        if self._outstanding == 0:
            self._busy_since, self._delivered = now, 0
        self._outstanding += num_bytes

    def delivered(self, num_bytes: int, now: float) -> None:
        """Or given up: `num_bytes` of those announced are no longer waited for."""
        self._delivered += num_bytes
        self._outstanding -= num_bytes
        seconds = now - self._busy_since
        if self._outstanding > 0 or seconds <= 0 or self._delivered < min(self._best_sample, MIN_SAMPLE_BYTES):
            return
        rate = self._delivered / seconds
        is_first_of_size = self._best_sample < MIN_SAMPLE_BYTES
        self.bytes_per_second += (rate - self.bytes_per_second) * (1.0 if is_first_of_size else EMA_WEIGHT)
        self._best_sample = max(self._best_sample, self._delivered)

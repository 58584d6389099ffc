"""Measure how fast a connection delivers, over the time in which bytes were outstanding. Time spent on prefill does not
count.
"""

EMA_WEIGHT = 0.3
"""Weight of a new sample in the moving average."""
MIN_SAMPLE_BYTES = 1 << 20
"""Bytes from which a sample measures throughput rather than latency. A smaller sample counts only until one of this
size exists.
"""


class ThroughputMeter:
    """Measures the throughput of one consumer connection, `bytes_per_second`; 0 until the first sample.

    A sample runs from the first announced byte until no byte is outstanding.
    """

    def __init__(self) -> None:
        self.bytes_per_second = 0.0
        self._outstanding = 0
        self._delivered = 0
        self._busy_since = 0.0
        self._best_sample = 0

    def announced(self, num_bytes: int, now: float) -> None:
        """Count bytes that the producer has announced and that are wanted here."""
        # Time in which nothing was outstanding is not transfer time: a new sample starts.
        if self._outstanding == 0:
            self._busy_since, self._delivered = now, 0
        self._outstanding += num_bytes

    def delivered(self, num_bytes: int, now: float) -> None:
        """Count announced bytes as arrived or given up: they are not outstanding any more."""
        self._delivered += num_bytes
        self._outstanding -= num_bytes
        seconds = now - self._busy_since
        if self._outstanding > 0 or seconds <= 0 or self._delivered < min(self._best_sample, MIN_SAMPLE_BYTES):
            return
        # The first large sample replaces the average of small ones, which measured latency.
        rate = self._delivered / seconds
        is_first_of_size = self._best_sample < MIN_SAMPLE_BYTES
        self.bytes_per_second += (rate - self.bytes_per_second) * (1.0 if is_first_of_size else EMA_WEIGHT)
        self._best_sample = max(self._best_sample, self._delivered)

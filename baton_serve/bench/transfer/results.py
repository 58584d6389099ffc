"""Results of `baton-bench kv`: one point for each transport or peer, block size and number of fetches."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton_serve.bench.report import Row


@dataclass(frozen=True, slots=True)
class Point:
    """Best speeds in bytes per second of a transfer and of the limit measured alternately with it."""

    name: str
    """A transport with its checksum mode, or a peer with its medium."""
    block_kib: int
    concurrency: int
    speed: float
    limit: float

    @property
    def ratio(self) -> float:
        return self.speed / self.limit

    def row(self, peers: Sequence["Point"] = ()) -> Row:
        """Return the row for the output, beside the fastest of `peers`."""
        fastest = max(peers, key=lambda point: point.speed, default=None)
        return Row(
            "kv",
            f"{self.name} {self.block_kib} KiB x{self.concurrency}",
            self.speed / 1e9,
            "GB/s",
            self.limit / 1e9,
            self.ratio,
            peer=fastest.name if fastest else None,
            peer_value=fastest.speed / 1e9 if fastest else None,
        )

"""What one worker tells of itself, and what several told as one answer. Pure."""

from collections.abc import Iterable, Mapping

import msgspec


class ProcessStats(msgspec.Struct, frozen=True, kw_only=True):
    requests_in_flight: int
    generated_tokens: int
    recent: list[tuple[float, msgspec.Raw]]
    """The last requests as JSON, each with the moment of its end on the machine's monotonic clock."""


def newest_requests(stats: Iterable[ProcessStats]) -> list[msgspec.Raw]:
    ended = [one for found in stats for one in found.recent]
    return [request for _, request in sorted(ended, key=lambda one: -one[0])]


def join_metrics(texts: Mapping[int, str]) -> str:
    """`texts` of each worker are as Prometheus reads them. Every sample gets the label `worker`: the counters of a
    process that was started again begin again by themselves, and no sum steps back."""
    families: dict[str, list[str]] = {}
    for worker, text in texts.items():
        family: list[str] = []
        for line in text.splitlines():
            if line.startswith("# HELP "):
                family = families.setdefault(line.split(" ", 3)[2], [])
            if not line.startswith("#"):
                family.append(_labelled(line, worker))
            elif line not in family:
                family.append(line)
    return "".join(f"{line}\n" for family in families.values() for line in family)


def _labelled(sample: str, worker: int) -> str:
    name, brace, rest = sample.partition("{")
    if brace:
        return f'{name}{{worker="{worker}",{rest}'
    name, _, value = sample.partition(" ")
    return f'{name}{{worker="{worker}"}} {value}'

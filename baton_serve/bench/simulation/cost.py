"""Durations of an instance's work, from a card's data sheet (`bench.cards`) or from results of `baton-bench engine`."""

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from baton_serve.bench.cards import (
    CARDS,
    DECODE_EFFICIENCY,
    MAX_NUM_SEQS,
    MODELS,
    WEIGHT_BYTES,
    GpuSpec,
    ModelSpec,
    kv_tokens,
    prefill_tokens_per_s,
)

PromptStep = Literal["alone", "beside"]
"""Kind of a step with prompts: alone, or beside decoding sequences."""
Points = tuple[tuple[int, float], ...]
"""Pairs of a number of tokens and seconds, sorted."""


class CostError(Exception):
    """A cost model cannot be built. The message says what is missing and where to get it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Durations in seconds. Prefill costs a constant per token, plus a constant for each earlier token that it attends
    to. A decode step reads the weights (`base_steps`: seconds by batch size) and the KV cache."""

    name: str
    prefill_s_per_token: float
    prefill_s_per_pair: float = 0.0
    base_steps: tuple[tuple[int, float], ...]
    step_s_per_kv_token: float
    kv_tokens: int
    kv_bytes_per_token: int
    link_bytes_per_s: float = 10e9
    """Bandwidth of an instance in each direction."""
    prompt_steps: Mapping[PromptStep, Points] = field(default_factory=dict)
    """Measured seconds of steps with prompts, by number of tokens including those of decoding sequences, without
    attention to earlier tokens. A size between two points takes the time of the next larger one. If empty, such a step
    takes as long as its prompts and its decoding sequences separately."""
    max_num_seqs: int = MAX_NUM_SEQS
    max_num_batched_tokens: int = 2048

    def prefill_s(self, start: int, length: int) -> float:
        """Return the seconds for `length` prompt tokens after `start` tokens whose KV is present."""
        return length * (self.prefill_s_per_token + self.prefill_s_per_pair * (start + length / 2))

    def chunks_s(self, chunks: Sequence[tuple[int, int]], batch: int, num_kv_tokens: float) -> float:
        """Return the seconds of a step with these chunks (start, length) and `batch` decoding sequences with that many
        KV tokens."""
        apart_s = sum([self.prefill_s(start, length) for start, length in chunks])
        if not self.prompt_steps:
            return apart_s + (self.step_s(batch, num_kv_tokens) if batch else 0.0)
        points = self.prompt_steps["beside" if batch else "alone"]
        num_tokens = sum([length for _, length in chunks]) + batch
        at = bisect_left(points, (num_tokens, 0.0))
        known, known_s = points[min(at, len(points) - 1)]
        beyond_s = max(0, num_tokens - known) * self.prefill_s_per_token
        earlier_s = sum([start * length for start, length in chunks]) * self.prefill_s_per_pair
        return known_s + beyond_s + earlier_s + num_kv_tokens * self.step_s_per_kv_token

    def base_step_s(self, batch: int) -> float:
        """Return the seconds of a decode step without KV reads: linear between measured batch sizes, and extrapolated
        beyond the last one."""
        points = self.base_steps
        at = bisect_left(points, (batch, 0.0))
        if at == 0 or len(points) == 1:
            return points[0][1]
        (low, low_s), (high, high_s) = points[at - 1 : at + 1] if at < len(points) else points[-2:]
        return low_s + (high_s - low_s) * (batch - low) / (high - low)

    def step_s(self, batch: int, num_kv_tokens: float) -> float:
        """Return the seconds of a decode step."""
        return self.base_step_s(batch) + num_kv_tokens * self.step_s_per_kv_token

    @property
    def prefill_tokens_per_s(self) -> float:
        """Return the prefill rate of short prompts, as the warm-up of an instance would measure it."""
        return 1.0 / (self.prefill_s_per_token + self.prefill_s_per_pair * self.max_num_batched_tokens / 2)


def card_named(name: str) -> GpuSpec:
    """Return a card by name, such as `B60` or `B60 24 GB`. Raises `CostError`."""
    for card in CARDS:
        if name.lower() in (card.name.lower(), card.name.split()[0].lower()):
            return card
    raise CostError(f"unknown card {name!r}; choose one of {', '.join(c.name.split()[0] for c in CARDS)}")


def model_named(name: str) -> ModelSpec:
    """Return a model by name. Raises `CostError`."""
    for model in MODELS:
        if model.name.lower() == name.lower():
            return model
    raise CostError(f"unknown model {name!r}; choose one of {', '.join(m.name for m in MODELS)}")


def from_card(card: GpuSpec, model: ModelSpec) -> CostModel:
    """Compute the cost model of a model on a card from data sheets. Raises `CostError` if the weights do not fit."""
    cache_tokens = kv_tokens(card, model)
    if not cache_tokens:
        raise CostError(f"{model.name} does not fit a {card.name} card")
    read = DECODE_EFFICIENCY * card.bytes_per_s
    return CostModel(
        name=f"{model.name} on {card.name} (computed from its data sheet)",
        prefill_s_per_token=1 / prefill_tokens_per_s(card, model),
        base_steps=((1, WEIGHT_BYTES * model.parameters / read),),
        step_s_per_kv_token=model.kv_bytes_per_token / read,
        kv_tokens=cache_tokens,
        kv_bytes_per_token=model.kv_bytes_per_token,
    )


def from_measurements(path: Path, model: ModelSpec) -> CostModel:
    """Build the cost model from the output of `baton-bench engine --json` for that model. Raises `CostError` if cases
    are missing. The output does not contain the size of the cache, so `kv_tokens` is 0.

    Prefill is a line fitted to seconds per token over prompt length. Decode is the measured steps at their context;
    the cost per KV token comes from steps at two contexts, or else from the measured read bandwidth.
    """
    values = _values(path)
    prefill = [(int(length), 1 / value) for case, length, value in _cases(values, "prefill")]
    steps = [(int(batch), int(context), value / 1e3) for batch, context, value in _cases(values, "decode")]
    if not prefill or not steps:
        raise CostError(f"{path} needs `prefill N x L` and `decode N x C` lines: baton-bench engine --json > {path}")
    per_kv = _kv_slope(steps)
    if per_kv is None and "read bandwidth" in values:
        per_kv = model.kv_bytes_per_token / (values["read bandwidth"] * 1e9)
    if per_kv is None:
        raise CostError(f"{path} has neither decode steps at two contexts nor the read bandwidth")
    per_token, per_pair = _line([(length / 2, seconds) for length, seconds in prefill])
    context = min(context for _, context, _ in steps)
    base = {batch: max(1e-6, seconds - batch * at * per_kv) for batch, at, seconds in steps if at == context}
    return CostModel(
        name=f"{model.name} as measured in {path.name}",
        prefill_s_per_token=per_token,
        prefill_s_per_pair=per_pair,
        base_steps=tuple(sorted(base.items())),
        step_s_per_kv_token=per_kv,
        kv_tokens=0,
        kv_bytes_per_token=model.kv_bytes_per_token,
    )


def prompt_steps(path: Path) -> dict[PromptStep, Points]:
    """Read the durations of steps with prompts from a JSON file: milliseconds by number of tokens, for steps `alone`
    and `beside` decoding sequences. Raises `CostError`."""
    try:
        content = json.loads(path.read_text())
        return {
            kind: tuple(sorted((int(tokens), float(ms) / 1e3) for tokens, ms in content[kind].items()))
            for kind in get_args(PromptStep)
        }
    except OSError as exc:
        raise CostError(f"cannot read {path}: {exc.strerror}") from exc
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise CostError(f'{path} needs {{"alone": {{"256": 6.1, …}}, "beside": …}}, in ms by tokens') from exc


def adjusted(
    cost: CostModel,
    *,
    prefill_tokens_per_s: float | None,
    kv_tokens: int | None,
    link_bytes_per_s: float,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> CostModel:
    """Return the cost model with the values given on the command line. Raises `CostError` if the size of the cache is
    unknown."""
    if prefill_tokens_per_s is not None:
        cost = replace(cost, prefill_s_per_token=1 / prefill_tokens_per_s, prefill_s_per_pair=0.0)
    if kv_tokens is None and not cost.kv_tokens:
        raise CostError("the size of the KV cache is not part of measured rates: give --kv-cache-tokens")
    return replace(
        cost,
        kv_tokens=kv_tokens or cost.kv_tokens,
        link_bytes_per_s=link_bytes_per_s,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )


def _values(path: Path) -> dict[str, float]:
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        return {row["case"]: float(row["value"]) for row in rows if row["bench"] == "engine"}
    except OSError as exc:
        raise CostError(f"cannot read {path}: {exc.strerror}") from exc
    except (KeyError, TypeError, ValueError) as exc:
        raise CostError(f"{path} is not output of `baton-bench engine --json`") from exc


def _cases(values: dict[str, float], kind: str) -> list[tuple[str, str, float]]:
    """Return (count, length, value) of all cases named `kind count x length`."""
    words = ((case.split(), value) for case, value in values.items())
    return [(case[1], case[3], value) for case, value in words if len(case) == 4 and case[0] == kind]


def _kv_slope(steps: Sequence[tuple[int, int, float]]) -> float | None:
    """Return the seconds per KV token, from the largest batch that was measured at two contexts, or None."""
    for batch in sorted({batch for batch, _, _ in steps}, reverse=True):
        at = sorted((batch * context, seconds) for number, context, seconds in steps if number == batch)
        if len(at) > 1 and at[-1][1] > at[0][1]:
            return (at[-1][1] - at[0][1]) / (at[-1][0] - at[0][0])
    return None


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit a line with least squares; return its value at 0 and its slope, which is at least 0."""
    mean_x, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in points) / spread) if spread else 0.0
    return max(1e-9, mean_y - slope * mean_x), slope

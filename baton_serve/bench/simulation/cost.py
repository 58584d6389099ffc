"""How long an instance takes: from a card's data sheet (`bench.cards`) or from what `baton-bench engine` measured."""

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
"""Prompts alone, or beside sequences that write."""
Points = tuple[tuple[int, float], ...]


class CostError(Exception):
    """A cost model that cannot be made. The message says what is missing and where to get it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Times in seconds. Prefill is compute: so much a token, and so much for each earlier token that it attends to.
    A decode step reads weights (`base_steps`: seconds by batch size) and K and V."""

    name: str
    prefill_s_per_token: float
    prefill_s_per_pair: float = 0.0
    base_steps: tuple[tuple[int, float], ...]
    step_s_per_kv_token: float
    kv_tokens: int
    kv_bytes_per_token: int
    link_bytes_per_s: float = 10e9
    """Of an instance, in each direction."""
    prompt_steps: Mapping[PromptStep, Points] = field(default_factory=dict)
    """Seconds of steps with prompts by their tokens, sequences that write among them, up to the next number that is
    known: without what they read of earlier tokens. Empty: as long as the prompts and the others would take apart."""
    max_num_seqs: int = MAX_NUM_SEQS
    max_num_batched_tokens: int = 2048

    def prefill_s(self, start: int, length: int) -> float:
        """Of `length` tokens after `start` tokens whose KV is there."""
        return length * (self.prefill_s_per_token + self.prefill_s_per_pair * (start + length / 2))

    def chunks_s(self, chunks: Sequence[tuple[int, int]], batch: int, num_kv_tokens: float) -> float:
        """Of a step with these chunks, (start, length), beside `batch` sequences that write and their KV tokens."""
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
        """Linear between the batches that are known, and beyond the last."""
        points = self.base_steps
        at = bisect_left(points, (batch, 0.0))
        if at == 0 or len(points) == 1:
            return points[0][1]
        (low, low_s), (high, high_s) = points[at - 1 : at + 1] if at < len(points) else points[-2:]
        return low_s + (high_s - low_s) * (batch - low) / (high - low)

    def step_s(self, batch: int, num_kv_tokens: float) -> float:
        return self.base_step_s(batch) + num_kv_tokens * self.step_s_per_kv_token

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of short prompts: what an instance's warm-up would measure."""
        return 1.0 / (self.prefill_s_per_token + self.prefill_s_per_pair * self.max_num_batched_tokens / 2)


def card_named(name: str) -> GpuSpec:
    """`B60` or `B60 24 GB`. Raises `CostError`."""
    for card in CARDS:
        if name.lower() in (card.name.lower(), card.name.split()[0].lower()):
            return card
    raise CostError(f"no card is named {name!r}; there are {', '.join(c.name.split()[0] for c in CARDS)}")


def model_named(name: str) -> ModelSpec:
    for model in MODELS:
        if model.name.lower() == name.lower():
            return model
    raise CostError(f"no model is named {name!r}; there are {', '.join(m.name for m in MODELS)}")


def from_card(card: GpuSpec, model: ModelSpec) -> CostModel:
    """Raises `CostError` if the weights do not fit."""
    room = kv_tokens(card, model)
    if not room:
        raise CostError(f"{model.name} does not fit a {card.name} card")
    read = DECODE_EFFICIENCY * card.bytes_per_s
    return CostModel(
        name=f"{model.name} on {card.name} (computed from its data sheet)",
        prefill_s_per_token=1 / prefill_tokens_per_s(card, model),
        base_steps=((1, WEIGHT_BYTES * model.parameters / read),),
        step_s_per_kv_token=model.kv_bytes_per_token / read,
        kv_tokens=room,
        kv_bytes_per_token=model.kv_bytes_per_token,
    )


def from_measurements(path: Path, model: ModelSpec) -> CostModel:
    """From the lines that `baton-bench engine --json` printed for that model. They do not tell `kv_tokens`: it is 0.

    Raises `CostError`.
    Prefill: a line through seconds per token over prompt length. Decode: the measured steps at their context; what
    another amount of KV costs comes from steps at two contexts, or else from the measured read bandwidth.
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
        raise CostError(f"{path} tells neither steps at two contexts nor the read bandwidth")
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
    """Of a JSON file: milliseconds by tokens, of steps with prompts `alone` and `beside` sequences that write. Raises
    `CostError`."""
    try:
        told = json.loads(path.read_text())
        return {
            kind: tuple(sorted((int(tokens), float(ms) / 1e3) for tokens, ms in told[kind].items()))
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
    """With what was given instead. Raises `CostError` if the size of the cache is not known."""
    if prefill_tokens_per_s is not None:
        cost = replace(cost, prefill_s_per_token=1 / prefill_tokens_per_s, prefill_s_per_pair=0.0)
    if kv_tokens is None and not cost.kv_tokens:
        raise CostError("measured rates do not tell the size of the cache: give --kv-cache-tokens")
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
        raise CostError(f"{path} is not what `baton-bench engine --json` prints") from exc


def _cases(values: dict[str, float], kind: str) -> list[tuple[str, str, float]]:
    """(count, length, value) of the cases `kind count x length`."""
    words = ((case.split(), value) for case, value in values.items())
    return [(case[1], case[3], value) for case, value in words if len(case) == 4 and case[0] == kind]


def _kv_slope(steps: Sequence[tuple[int, int, float]]) -> float | None:
    """Seconds per token of KV, from the greatest batch that was measured at two contexts."""
    for batch in sorted({batch for batch, _, _ in steps}, reverse=True):
        at = sorted((batch * context, seconds) for number, context, seconds in steps if number == batch)
        if len(at) > 1 and at[-1][1] > at[0][1]:
            return (at[-1][1] - at[0][1]) / (at[-1][0] - at[0][0])
    return None


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares: the value at 0 and the slope, which is not negative."""
    mean_x, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in points) / spread) if spread else 0.0
    return max(1e-9, mean_y - slope * mean_x), slope

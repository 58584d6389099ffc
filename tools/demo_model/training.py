"""The training loop: worker processes build batches, AdamW, accuracy while training, the best weights are kept.

Reproducible: batch i depends on (seed, i) only. The schedule becomes shorter by itself if the time limit would be
exceeded.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaForCausalLM

from tools.demo_model.batches import PADDING, Batch, Layout, layout_at, make_batch
from tools.demo_model.corpus import ANSWER, CONTEXT
from tools.demo_model.network import TrainingForward
from tools.demo_model.tokenization import WordEncoder

Evaluate = Callable[[TrainingForward], dict[str, float]]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Parameters of a training run."""

    steps: int
    batch_tokens: int
    max_seconds: float
    num_workers: int
    seed: int
    evaluations: int
    goal: float  # stop when every accuracy is at least this
    compiled: bool
    peak_rate: float = 2e-3
    warmup_steps: int = 150
    weight_decay: float = 0.1


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a training run."""

    weights: dict[str, Tensor]  # of the best evaluation, on the CPU
    accuracies: dict[str, float]
    steps: int
    tokens: int
    seconds: float


class _Batches(Dataset[Batch]):
    def __init__(self, encoder: WordEncoder, recipe: Recipe) -> None:
        self._encoder, self._recipe = encoder, recipe

    def __len__(self) -> int:
        return self._recipe.steps

    def __getitem__(self, index: int) -> Batch:
        layout = layout_at(index / self._recipe.steps, self._recipe.batch_tokens)
        return make_batch(self._encoder, layout, seed=self._recipe.seed, index=index)


def train(
    model: LlamaForCausalLM, encoder: WordEncoder, recipe: Recipe, evaluate: Evaluate, device: torch.device
) -> Outcome:
    """Train `model` in place, print a line at each evaluation and return the best weights."""
    torch.set_float32_matmul_precision("high")
    forward = TrainingForward(model, compiled=recipe.compiled)
    plain = TrainingForward(model, compiled=False)
    optimizer = _optimizer(model, recipe, device)
    started = time.monotonic()
    outcome = Outcome({}, {}, 0, 0, 0.0)
    every = max(1, recipe.steps // recipe.evaluations)
    answer_losses: list[Tensor] = []
    for step, batch in enumerate(_loaded(encoder, recipe, device)):
        elapsed = time.monotonic() - started
        progress = max(step / recipe.steps, elapsed / recipe.max_seconds)
        is_last = step + 1 == recipe.steps or progress >= 1
        for group in optimizer.param_groups:
            group["lr"] = recipe.peak_rate * _rate(step, progress, recipe)
        layout = layout_at(step / recipe.steps, recipe.batch_tokens)
        answer_losses.append(_step(forward, model, optimizer, batch, layout, 0.1 if progress < 0.3 else 0.03))
        if (step + 1) % every == 0 or is_last:
            accuracies = evaluate(plain)
            elapsed = time.monotonic() - started
            report = " ".join(f"{name} {value:.3f}" for name, value in accuracies.items())
            loss = torch.stack(answer_losses).mean().item()
            print(f"step {step + 1} {elapsed:.0f}s answer loss {loss:.4f} | {report}", flush=True)
            answer_losses.clear()
            if sum(accuracies.values()) >= sum(outcome.accuracies.values()):
                weights = {name: weight.detach().cpu().clone() for name, weight in model.state_dict().items()}
                outcome = Outcome(weights, accuracies, step + 1, (step + 1) * recipe.batch_tokens, elapsed)
            if is_last or min(accuracies.values()) >= recipe.goal:
                break
    return outcome


def _step(forward: TrainingForward, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: Batch,
          layout: Layout, context_weight: float) -> Tensor:  # fmt: skip
    """Do one update. Answers have weight 1, text of the user `context_weight`. Return the mean loss of answers."""
    tokens, kinds = batch.tokens.long(), batch.kinds
    targets = torch.roll(tokens, -1)
    kind = torch.roll(kinds, -1)  # a row's last token predicts the next row's first, always `begin`: harmless
    weights = (kind == ANSWER).float() + context_weight * (kind == CONTEXT).float() * (kinds != PADDING).float()
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        losses = forward.token_losses(forward.hidden(tokens, layout), targets)
        loss = (losses * weights).sum() / weights.sum()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    is_answer = (kind == ANSWER).float()
    return ((losses.detach() * is_answer).sum() / is_answer.sum()).detach()


def _rate(step: int, progress: float, recipe: Recipe) -> float:
    """Return the factor of the learning rate: warm-up, constant, then a cosine down to 0 over the last 55 %."""
    warm = min(1.0, (step + 1) / recipe.warmup_steps)
    return warm * (1.0 if progress < 0.45 else 0.5 * (1 + math.cos(math.pi * (min(progress, 1.0) - 0.45) / 0.55)))


def _optimizer(model: LlamaForCausalLM, recipe: Recipe, device: torch.device) -> torch.optim.Optimizer:
    matrices = [w for n, w in model.named_parameters() if w.ndim == 2 and "embed" not in n]
    others = [w for n, w in model.named_parameters() if w.ndim != 2 or "embed" in n]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.95), fused=device.type != "cpu")


def _loaded(encoder: WordEncoder, recipe: Recipe, device: torch.device) -> Iterator[Batch]:
    loader: DataLoader[Batch] = DataLoader(
        _Batches(encoder, recipe),
        batch_size=None,
        shuffle=False,
        num_workers=recipe.num_workers,
        prefetch_factor=8 if recipe.num_workers else None,
    )
    for batch in loader:
        yield Batch(batch.tokens.to(device, non_blocking=True), batch.kinds.to(device, non_blocking=True))

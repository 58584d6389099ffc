"""The training loop of the vision demo. Batch i depends on (seed, i) alone.

Beside the answers, a head that is thrown away afterwards reads from each patch which digit of the number covers it, at
which place, in which colour: the tower then learns from 64 places of a picture in place of one answer, which takes
minutes on one core.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlavaForConditionalGeneration

from tools.demo_model.tokenization import BEGIN, END, PAD, ROLES
from tools.vision_demo.network import IMAGE, NUM_PATCHES, PATCH, special_ids
from tools.vision_demo.pictures import EDGE, INKS, Picture, VisualQuestion, make_question

IGNORED = -100
"""Label of tokens that are not part of an answer."""
_NUM_CLASSES = (11, 4, len(INKS) + 1)
"""Of the digit that covers a patch, of its place in the number and of its colour; the last class of each is none."""


@dataclass(frozen=True, slots=True)
class VisionRecipe:
    """Parameters of a training run. `max_seconds` makes the schedule shorter if need be."""

    steps: int
    batch: int
    seed: int
    max_seconds: float
    peak_rate: float = 2e-3
    warmup_steps: int = 100


@dataclass(frozen=True, slots=True)
class VisionBatch:
    """Tokens and labels [questions, longest], pixels [pictures, 3, EDGE, EDGE], and classes of patches
    [3, pictures, 64]: digit, place and colour.
    """

    tokens: Tensor
    labels: Tensor
    pixels: Tensor
    classes: Tensor


def make_batch(tokenizer: Tokenizer, asked: Sequence[VisualQuestion], rng: Random) -> VisionBatch:
    """Return these questions with their answers; half of the pictures are blurred as a picture of another size is by
    the image processor.
    """
    ids = special_ids(tokenizer)
    rows = [_row(tokenizer, ids, question) for question in asked]
    longest = max(len(row) for row, _ in rows)
    tokens = torch.full((len(rows), longest), ids[PAD])
    labels = torch.full((len(rows), longest), IGNORED)
    for number, (row, start) in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
        labels[number, start : len(row)] = tokens[number, start : len(row)]
    pictures = [question.picture for question in asked if question.picture is not None]
    pixels = np.stack([_pixels(picture, is_blurred=rng.random() < 0.5) for picture in pictures])
    classes = torch.stack([_classes(picture) for picture in pictures], dim=1)
    return VisionBatch(tokens, labels, torch.from_numpy(pixels), classes)


def train(model: LlavaForConditionalGeneration, tokenizer: Tokenizer, recipe: VisionRecipe) -> int:
    """Train `model` in place, print a line at each 100 steps and return the number of steps."""
    torch.manual_seed(recipe.seed)
    inner: Any = model.model
    reader = nn.Linear(model.config.text_config.hidden_size, sum(_NUM_CLASSES))
    seen: list[Tensor] = []
    hook = inner.multi_modal_projector.register_forward_hook(lambda module, given, output: seen.append(output))
    optimizer = torch.optim.AdamW([*model.parameters(), *reader.parameters()], lr=recipe.peak_rate, betas=(0.9, 0.95))
    started = time.monotonic()
    step, progress = 0, 0.0
    while progress < 1:
        rng = Random(f"{recipe.seed}/{step}")
        batch = make_batch(tokenizer, [make_question(rng) for _ in range(recipe.batch)], rng)
        for group in optimizer.param_groups:
            group["lr"] = recipe.peak_rate * _rate(step, progress, recipe)
        seen.clear()
        answers = model(input_ids=batch.tokens, pixel_values=batch.pixels, labels=batch.labels).loss
        patches = _patch_loss(reader(seen[0]), batch)
        (answers + patches).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        elapsed = time.monotonic() - started
        progress = max(step / recipe.steps, elapsed / recipe.max_seconds)
        if step % 100 == 0 or progress >= 1:
            print(f"step {step} {elapsed:.0f}s answers {answers:.4f} patches {patches:.4f}", flush=True)
    hook.remove()
    return step


def _row(tokenizer: Tokenizer, ids: dict[str, int], question: VisualQuestion) -> tuple[list[int], int]:
    """Return the tokens of a question with its answer, and where the answer begins: those of the chat template."""

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    shown = [ids[IMAGE]] * NUM_PATCHES if question.picture else []
    asked = [ids[BEGIN], ids[ROLES["user"]], *shown, *encode(question.text), ids[END], ids[ROLES["assistant"]]]
    return [*asked, *encode(question.answer), ids[END]], len(asked)


def _pixels(picture: Picture, *, is_blurred: bool) -> "np.ndarray[Any, np.dtype[np.float32]]":
    image = picture.draw()
    if is_blurred:
        large = image.resize((3 * EDGE, 3 * EDGE), Image.Resampling.NEAREST)
        image = large.resize((EDGE, EDGE), Image.Resampling.BICUBIC)
    return np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / 127.5 - 1


def _classes(picture: Picture) -> Tensor:
    """Return the digit that covers the middle of each patch, its place in the number and its colour [3, patches]."""
    side = EDGE // PATCH
    classes = torch.tensor(_NUM_CLASSES)[:, None, None].repeat(1, side, side) - 1
    colour = list(INKS).index(picture.colour)
    middles = torch.arange(side) * PATCH + PATCH // 2
    for place, (digit, (left, top, right, bottom)) in enumerate(zip(picture.number, picture.boxes, strict=True)):
        is_row, is_column = (middles >= top) & (middles < bottom), (middles >= left) & (middles < right)
        covered = is_row[:, None] & is_column[None]
        classes[:, covered] = torch.tensor([int(digit), place, colour])[:, None]
    return classes.flatten(1)


def _patch_loss(scores: Tensor, batch: VisionBatch) -> Tensor:
    flat: Any = scores.flatten(0, -2)
    parts = flat.split(_NUM_CLASSES, dim=-1)
    losses = [F.cross_entropy(part, of.flatten()) for part, of in zip(parts, batch.classes, strict=True)]
    return torch.stack(losses).sum()


def _rate(step: int, progress: float, recipe: VisionRecipe) -> float:
    """Return the factor of the learning rate: warm-up, constant, then a cosine down to 0 over the last 60 %."""
    warm = min(1.0, (step + 1) / recipe.warmup_steps)
    return warm * (1.0 if progress < 0.4 else 0.5 * (1 + math.cos(math.pi * (min(progress, 1.0) - 0.4) / 0.6)))

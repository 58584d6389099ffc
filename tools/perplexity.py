"""Measure how much each format of `--quantization` costs the bundled demo model: `python -m tools.perplexity`.

It computes the perplexity of fresh conversations, from seeds that no training batch uses, with transformers in float32
on the dequantized weights. Answers alone are nearly certain, because the model knows its tasks, so questions count
too; a second column has the mean loss of the answers. Prints a table for docs/reference/quantization.md.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import get_args

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForCausalLM

from baton_serve.engine.config import CHECKPOINT_ONLY, Quantization
from baton_serve.engine.kernels.quantized_weights import QuantizedWeight, dequantize
from baton_serve.engine.loading.quantization.layer_by_layer import round_loaded
from baton_serve.engine.model.quantized.formats import scheme
from baton_serve.engine.model.quantized.modules import QuantizedEmbedding, QuantizedLinear
from baton_serve.engine.model.quantized.quantization_plan import QuantizationPlan
from tools.demo_model.corpus import ANSWER, conversation, encode
from tools.demo_model.tokenization import WordEncoder

Row = tuple[list[int], list[int]]


@dataclass(frozen=True, slots=True)
class Score:
    perplexity: float
    """Perplexity of all tokens."""
    answer_loss: float
    """Mean loss of the tokens of answers, in nats."""


def main() -> None:
    options = _options()
    encoder = WordEncoder(Tokenizer.from_file(str(options.model / "tokenizer.json")))
    rng = Random("perplexity")
    rows = [
        encode(encoder, conversation(rng, encoder, num_tokens=rng.choice((120, 240, 900))))
        for _ in range(options.conversations)
    ]
    plain = score(_load(options.model), rows)
    print("| format | perplexity | change | loss of answers |\n|---|---|---|---|")
    print(f"| none (float32) | {plain.perplexity:.3f} | | {plain.answer_loss:.1e} |", flush=True)
    for name, group in _formats():
        found = score(rounded(options.model, name, group), rows)
        label = f"`{name}`" + (f", group {group}" if name in ("sym_int4", "asym_int4", "fp6") else "")
        change = found.perplexity / plain.perplexity - 1
        print(f"| {label} | {found.perplexity:.3f} | {change:+.2%} | {found.answer_loss:.1e} |", flush=True)


@torch.inference_mode()
def score(model: nn.Module, rows: list[Row]) -> Score:
    """Compute the score over all tokens of all rows together."""
    losses, are_answers = [], []
    for ids, kinds in rows:
        tokens = torch.tensor([ids])
        logits = model(input_ids=tokens).logits[0, :-1]
        losses.append(nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none").double())
        are_answers.append(torch.tensor(kinds[1:]) == ANSWER)
    every = torch.cat(losses)
    return Score(math.exp(float(every.mean())), float(every[torch.cat(are_answers)].mean()))


def rounded(folder: Path, name: Quantization, group: int) -> nn.Module:
    """Return the model with dequantized weights, including an embedding that shares the weights of the head."""
    made = round_loaded(
        _load(folder),
        QuantizationPlan(scheme(name, fp8_dtype="e4m3", group_size=group)),
        torch.device("cpu"),
        torch.float32,
    )
    model = _load(folder)
    for path, part in made.named_modules():
        if isinstance(part, QuantizedLinear) and isinstance(part.weight, QuantizedWeight):
            model.get_parameter(f"{path}.weight").data = dequantize(part.weight)
        elif isinstance(part, QuantizedEmbedding):
            model.get_parameter(f"{path}.weight").data = dequantize(made.get_submodule("lm_head").weight)  # type: ignore[arg-type]
    return model


def _formats() -> Iterator[tuple[Quantization, int]]:
    names: tuple[Quantization, ...] = get_args(Quantization)
    for name in names:
        if name in CHECKPOINT_ONLY or name == "fp8":
            continue
        for group in (128, 32) if name in ("sym_int4", "asym_int4") else (128,):
            yield name, group


def _load(folder: Path) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("services/local/demo_model"), help="folder of the model")
    parser.add_argument("--conversations", type=int, default=60, help="number of conversations")
    return parser.parse_args()


if __name__ == "__main__":
    main()

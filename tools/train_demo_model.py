"""Train the bundled demo model from nothing but a seed: `python -m tools.train_demo_model --out FOLDER`.

Run it from the repository root. It trains the tokenizer and the model on the generated corpus, evaluates the model on
fresh questions, and writes a Hugging Face folder. `--tiny` runs all of this in a minute on a CPU.
"""

import argparse
import json
import os
import platform
import time
from itertools import islice
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaForCausalLM

from tools.demo_model.corpus import conversation
from tools.demo_model.evaluation import SHOWN, Judge, Question, forced_accuracy, questions
from tools.demo_model.network import TrainingForward, demo_config, initialise
from tools.demo_model.tokenization import BEGIN, END, PAD, SPECIAL, WordEncoder, save_tokenizer, train_tokenizer
from tools.demo_model.training import Outcome, Recipe, train

MAX_TOKENS = 2048


def main() -> None:
    options = _options()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    started = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(_texts(options.seed, 400 if options.tiny else 12_000), vocab_size=options.vocab_size)
    encoder = WordEncoder(tokenizer)
    ids = encoder.ids
    config = demo_config(
        vocab_size=tokenizer.get_vocab_size(), bos=ids[BEGIN], eos=ids[END], pad=ids[PAD], is_tiny=options.tiny
    )
    model = LlamaForCausalLM(config)
    initialise(model, seed=options.seed)
    model.to(device)
    parameters = sum(weight.numel() for weight in model.parameters())
    print(
        f"{parameters:,} parameters, {config.vocab_size} tokens, {device}, {time.monotonic() - started:.0f}s",
        flush=True,
    )
    asked = questions(encoder, seed=f"{options.seed}/while-training", count=8 if options.tiny else 200)

    def evaluate(forward: TrainingForward) -> dict[str, float]:
        return {name: forced_accuracy(forward, encoder, fresh, device) for name, fresh in asked.items()}

    outcome = train(model, encoder, _recipe(options, device), evaluate, device)
    _save(options.out, model, tokenizer, outcome)
    _report(options, encoder, outcome, parameters, device)
    print(f"done in {time.monotonic() - started:.0f}s", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="output folder (created if missing)")
    parser.add_argument("--steps", type=int, default=4000, help="number of training steps")
    parser.add_argument("--batch-tokens", type=int, default=2**17, help="tokens per step, a power of two")
    parser.add_argument(
        "--max-seconds", type=float, default=100_000.0, help="time limit; the schedule becomes shorter to meet it"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=min(14, max(1, (os.cpu_count() or 2) - 1)),
        help="number of processes that build batches",
    )
    parser.add_argument("--vocab-size", type=int, default=2304, help="number of tokens in the vocabulary")
    parser.add_argument("--peak-rate", type=float, default=2e-3, help="largest learning rate")
    parser.add_argument("--evaluations", type=int, default=12, help="number of evaluations while training")
    parser.add_argument(
        "--final-questions", type=int, default=500, help="questions per set in the final evaluation with transformers"
    )
    parser.add_argument("--goal", type=float, default=0.9999, help="stop when every accuracy reaches this")
    parser.add_argument("--seed", type=int, default=20, help="seed of corpus, weights and batches")
    parser.add_argument(
        "--tiny", action="store_true", help="train a small network with few questions, to test the script"
    )
    return parser.parse_args()


def _recipe(options: argparse.Namespace, device: torch.device) -> Recipe:
    return Recipe(
        steps=options.steps,
        batch_tokens=options.batch_tokens,
        max_seconds=options.max_seconds,
        num_workers=options.workers,
        seed=options.seed,
        evaluations=options.evaluations,
        goal=options.goal,
        compiled=device.type == "cuda",
        peak_rate=options.peak_rate,
    )


class _Words:
    """Counts words instead of tokens: the tokenizer does not exist yet when its training texts are generated."""

    def __init__(self) -> None:
        self.ids = dict.fromkeys(SPECIAL, 0)

    def encode(self, text: str) -> list[int]:
        return [0] * (len(text.split()) + 2)

    def measure(self, text: str) -> int:
        return len(self.encode(text))


def _texts(seed: int, count: int) -> list[str]:
    rng = Random(f"{seed}/tokenizer")
    made = (conversation(rng, _Words(), num_tokens=rng.choice((128, 512))) for _ in islice(iter(int, 1), count))
    return [content for messages in made for _, content in messages]


def _save(folder: Path, model: LlamaForCausalLM, tokenizer: Tokenizer, outcome: Outcome) -> None:
    model.load_state_dict(outcome.weights)
    half = LlamaForCausalLM(model.config)
    half.load_state_dict(outcome.weights)
    half.tie_weights()
    half.to(torch.bfloat16)
    half.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    half.save_pretrained(folder)
    _add_old_names(folder / "config.json")
    save_tokenizer(tokenizer, folder, max_tokens=MAX_TOKENS)


def _add_old_names(config_file: Path) -> None:
    """Add the old names of fields to config.json: transformers 5 writes `rope_parameters` and `dtype`, and software
    that knows only the older names would use defaults."""
    config = json.loads(config_file.read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    config["torch_dtype"] = config["dtype"]
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _report(
    options: argparse.Namespace, encoder: WordEncoder, outcome: Outcome, parameters: int, device: torch.device
) -> None:
    count = 4 if options.tiny else options.final_questions
    fresh = questions(encoder, seed=f"{options.seed}/final", count=count)
    judge = Judge(options.out, device)
    accuracies = {name: _graded(judge, name, asked) for name, asked in fresh.items()}
    half = Judge(options.out, device, torch.bfloat16)
    in_half = {name: _graded(half, name, fresh[name]) for name in ("lookup 1000", "sums", "call")}
    replies = judge.reply([[("user", said)] for said in SHOWN], max_new_tokens=120)
    for said, reply in zip(SHOWN, replies, strict=True):
        print(f"> {said}\n{reply}", flush=True)
    figures = {
        "parameters": parameters,
        "steps": outcome.steps,
        "tokens": outcome.tokens,
        "seconds": round(outcome.seconds, 1),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "questions_per_set": count,
        "accuracies": accuracies,
        "accuracies_bfloat16": in_half,
        "arguments": {key: str(value) for key, value in vars(options).items() if key != "out"},
    }
    (options.out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")


def _graded(judge: Judge, name: str, asked: list[Question]) -> float:
    wrong = judge.mistakes(asked)
    accuracy = 1 - len(wrong) / len(asked)
    print(f"generated {judge.model.dtype}: {name} {accuracy:.4f}", flush=True)
    for mistake in wrong[:4]:
        asked_last = mistake.question.messages[-1][1][-80:]
        print(f"  wrong: {asked_last!r} -> {mistake.reply!r}, not {mistake.question.answer!r}", flush=True)
    return accuracy


if __name__ == "__main__":
    main()

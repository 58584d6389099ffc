"""Train the model of `make demo-vision` from nothing but a seed: `python -m tools.train_vision_demo --out FOLDER`.

Run it from the repository root. It draws its pictures, trains the tokenizer, the vision tower and the decoder together,
and answers fresh questions with transformers. One core takes some ten minutes.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlavaForConditionalGeneration

from tools.vision_demo.evaluation import VisionJudge, fresh_questions
from tools.vision_demo.network import initialise, make_tokenizer, save_model, special_ids, vision_config
from tools.vision_demo.training import VisionRecipe, train


def main() -> None:
    options = _options()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    started = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.start:
        tokenizer = Tokenizer.from_file(str(options.start / "tokenizer.json"))
        model = LlavaForConditionalGeneration.from_pretrained(options.start, dtype=torch.float32)
    else:
        tokenizer = make_tokenizer(fresh_questions(f"{options.seed}/tokenizer", 2000), vocab_size=320)
        config = vision_config(special_ids(tokenizer), vocab_size=tokenizer.get_vocab_size())
        model = LlavaForConditionalGeneration(config)
        initialise(model, seed=options.seed)
    model.train()
    parameters = sum(weight.numel() for weight in model.parameters())
    print(f"{parameters:,} parameters, {tokenizer.get_vocab_size()} tokens", flush=True)
    recipe = VisionRecipe(options.steps, options.batch, options.seed, options.max_seconds, options.peak_rate)
    steps = train(model, tokenizer, recipe)
    save_model(options.out, model, tokenizer)
    asked = fresh_questions(f"{options.seed}/final", options.final_questions)
    wrong = VisionJudge(options.out).wrong(asked)
    for question, said in wrong[:10]:
        print(f"  wrong: {question} -> {said!r}", flush=True)
    figures = {
        "parameters": parameters,
        "steps": steps,
        "seconds": round(time.monotonic() - started, 1),
        "torch": torch.__version__,
        "questions": len(asked),
        "accuracy": 1 - len(wrong) / len(asked),
    }
    print(json.dumps(figures, indent=2), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="output folder (created if missing)")
    parser.add_argument("--steps", type=int, default=4000, help="number of training steps")
    parser.add_argument("--batch", type=int, default=32, help="questions per step")
    parser.add_argument("--max-seconds", type=float, default=100_000.0, help="time limit; makes the schedule shorter")
    parser.add_argument("--peak-rate", type=float, default=2e-3, help="largest learning rate")
    parser.add_argument("--start", type=Path, help="folder of a model to train on; give another --seed")
    parser.add_argument("--final-questions", type=int, default=1000, help="fresh questions at the end")
    parser.add_argument("--seed", type=int, default=20, help="seed of pictures, weights and batches")
    return parser.parse_args()


if __name__ == "__main__":
    main()

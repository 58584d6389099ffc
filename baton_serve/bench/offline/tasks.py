"""Tasks with one right answer, a number, as in gsm8k: look-ups in a text, and sums. They are generated from
a random stream that no training used."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from random import Random

from baton_serve.services.local.demo import make_demo_prompt

NUM_FACTS = 20
"""Facts in the text of a look-up: about 330 tokens of the bundled model."""
MAX_ANSWER_TOKENS = 24
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class AccuracyTask:
    """A question, sent as a chat of one message, and the number that is its answer."""

    question: str
    answer: str


def make_tasks(count: int, *, seed: int) -> list[AccuracyTask]:
    """Return `count` tasks: look-ups and sums in turn."""
    rng = Random(f"accuracy/{seed}")
    return [_lookup(rng) if number % 2 == 0 else _sum(rng) for number in range(count)]


def _lookup(rng: Random) -> AccuracyTask:
    prompt = make_demo_prompt(rng, num_facts=NUM_FACTS)
    fact = rng.choice(prompt.facts)
    return AccuracyTask(f"{prompt.text} {fact.question}", fact.code)


def _sum(rng: Random) -> AccuracyTask:
    first, second = rng.randint(10, 499), rng.randint(10, 499)
    return AccuracyTask(f"What is {first} + {second}?", str(first + second))


def exact_match(tasks: Sequence[AccuracyTask], answers: Sequence[str]) -> float:
    """Return the fraction of answers whose last number is the right one."""
    right = [_last_number(text) == task.answer for task, text in zip(tasks, answers, strict=True)]
    return sum(right) / len(right)


def _last_number(text: str) -> str | None:
    found = _NUMBER.findall(text)
    return found[-1] if found else None


MIN_ERROR_RATE = 0.005
"""The error rate that is assumed at least: a reference of 1.0 would not allow a single mistake otherwise."""
CHANCE = 0.001
"""The probability with which a model as good as the reference may fail the gate."""


def allowed_mistakes(count: int, reference: float) -> int:
    """Return the most wrong answers to `count` tasks with which the accuracy `reference` is still plausible."""
    rate, within = max(MIN_ERROR_RATE, 1 - reference), 0.0
    for mistakes in range(count):
        within += comb(count, mistakes) * rate**mistakes * (1 - rate) ** (count - mistakes)
        if within >= 1 - CHANCE:
            return mistakes
    return count

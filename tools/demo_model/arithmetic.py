"""Generate small sums in many phrasings, each with its one right answer. Independent of the other topics."""

from collections.abc import Callable
from random import Random

from tools.demo_model.lexicon import NAMES, THINGS

Turn = tuple[str, str]  # what the user says, what the model answers
_SIGNS = {"+": ("+", "plus"), "-": ("-", "minus"), "*": ("*", "times", "x", "multiplied by"), "/": ("/", "divided by")}
_FRAMES = (
    "What is {s}?",
    "What is {s}?",
    "{s}",
    "{s} =",
    "{s}?",
    "Calculate {s}.",
    "How much is {s}?",
    "Please tell me what {s} is.",
    "What does {s} make?",
    "Can you work out {s}?",
)


def sum_turn(rng: Random) -> Turn:
    """Return a question such as `12 + 30` and its answer `12 + 30 = 42.`; one in ten is a short story."""
    if rng.random() < 0.1:
        return _story(rng)
    sign = rng.choices("+-*/", weights=(40, 32, 20, 8))[0]
    left, right, result = _operands(rng, sign)
    word = rng.choice(_SIGNS[sign])
    is_tight = not word.isalpha() and rng.random() < 0.2
    shown = f"{left}{word}{right}" if is_tight else f"{left} {word} {right}"
    return rng.choice(_FRAMES).replace("{s}", shown), f"{left} {sign} {right} = {result}."


def _operands(rng: Random, sign: str) -> tuple[int, int, int]:
    if sign == "*":
        left, right = rng.randint(0, 12), rng.randint(0, 12)
        if rng.random() < 0.3:
            left, right = rng.randint(2, 9), rng.randint(10, 99)
            if rng.random() < 0.5:
                left, right = right, left
        return left, right, left * right
    if sign == "/":
        right, result = rng.randint(1, 12), rng.randint(0, 12)
        return right * result, right, result
    left, right = (rng.randrange(10 ** rng.choices((1, 2, 3), weights=(2, 4, 4))[0]) for _ in range(2))
    if sign == "-" and left < right and rng.random() < 0.85:
        left, right = right, left
    return left, right, left + right if sign == "+" else left - right


def _story(rng: Random) -> Turn:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    has, change = rng.randint(2, 60), rng.randint(1, 40)
    gains: tuple[Callable[[], str], ...] = (
        lambda: f"{name} has {has} {thing} and buys {change} more.",
        lambda: f"{name} finds {change} {thing} and already has {has}.",
    )
    total = has + change
    text = rng.choice(gains)()
    if rng.random() < 0.5:
        has, change = max(has, change), min(has, change)
        text, total = f"{name} has {has} {thing} and gives away {change}.", has - change
    return f"{text} How many {thing} does {name} have now?", f"{name} has {total} {thing} now."

"""Generate short English conversations: greetings, who the model is, what Baton does, facts, counting, stories,
refusals.

Each question has exactly one answer, so that a greedy reply is either right or wrong.
"""

from random import Random

from tools.demo_model import lexicon as words
from tools.demo_model.lookups import filler
from tools.demo_model.phrases import FACTS, INTENTS, OUT_OF_SCOPE, REFUSAL, TOPICS

Turn = tuple[str, str]  # what the user says, what the model answers
_NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()
_OPENERS = ("", "", "", "", "", "", "Please, ", "Hi! ", "Hello, ", "Hey, ", "OK, ", "Thanks. ", "One more question: ")
_PLOTS = (
    "Once upon a time there was a {a} who lived near the river. One day the {a} found a small lamp in the grass. The "
    "lamp was cold and dark, so the {a} carried it home and cleaned it. In "
    "the evening the lamp began to shine, and all "
    "the animals came to see the light. From that day on, nobody was lost in the forest at night. The end.",
    "Once upon a time a {a} wanted to see the sea. The {a} walked over the hills for three days. On the first day it "
    "rained, on the second day it was windy, and on the third day the sun came out. At last the {a} stood on the beach "
    "and listened to the waves. It was very happy, and it went home with a shell. The end.",
    "Once upon a time there was a {a} who ran in a relay race. The first runner was fast, but the baton fell to the "
    "ground. The {a} picked it up, held it well, and ran as fast as the wind. The last runner took the baton and won "
    "the race. All the friends thanked the {a}, because a good handoff wins the race. The end.",
)


def chat_turn(rng: Random) -> Turn:
    """Return a question and its answer, independent of earlier turns."""
    kind = rng.random()
    if kind < 0.42:
        questions, answer = rng.choice(INTENTS)
        return casual(rng, rng.choice(questions)), answer
    if kind < 0.66:
        questions, answer = rng.choice(FACTS)
        return casual(rng, rng.choice(questions)), answer
    if kind < 0.74:
        return _counting(rng)
    if kind < 0.80:
        return _story(rng)
    if kind < 0.92:
        return _repeat(rng)
    return casual(rng, rng.choice(OUT_OF_SCOPE).replace("{t}", rng.choice(TOPICS))), REFUSAL


def name_turns(rng: Random) -> tuple[Turn, Turn]:
    """Return two turns: the user gives a name, and asks for it later in the same conversation."""
    name = rng.choice(words.NAMES) if rng.random() < 0.6 else words.invented_word(rng).capitalize()
    introduction = rng.choice(
        ("My name is {n}.", "I am {n}.", "Hi, I am {n}.", "Hello, my name is {n}.", "Call me {n}.")
    )
    asked = rng.choice(("What is my name?", "Do you know my name?", "Who am I?", "What did I say my name was?"))
    return (introduction.replace("{n}", name), f"Nice to meet you, {name}!"), (asked, f"Your name is {name}.")


def casual(rng: Random, question: str) -> str:
    """Return the question as people type it: in lower case, without the final mark, or with a polite word."""
    style = rng.random()
    if style < 0.12:
        question = question.lower()
    elif style < 0.2:
        question = question[0].lower() + question[1:]
    if rng.random() < 0.15:
        question = question.rstrip("?.!")
    return rng.choice(_OPENERS) + question if rng.random() < 0.3 else question


def _counting(rng: Random) -> Turn:
    kind = rng.randrange(4)
    if kind == 0:
        low, high = 1, rng.randint(3, 30)
        return casual(rng, rng.choice((f"Count to {high}.", f"Count from 1 to {high}."))), _listed(range(low, high + 1))
    if kind == 1:
        low = rng.randint(0, 80)
        high = low + rng.randint(2, 20)
        return casual(rng, f"Count from {low} to {high}."), _listed(range(low, high + 1))
    if kind == 2:
        high = rng.randint(3, 20)
        return casual(rng, f"Count down from {high}."), _listed(range(high, -1, -1))
    factor = rng.randint(2, 12)
    question = rng.choice((f"Show me the table of {factor}.", f"Count in steps of {factor}."))
    return casual(rng, question), _listed(range(factor, factor * 10 + 1, factor))


def _listed(numbers: range) -> str:
    return ", ".join(map(str, numbers)) + "."


def _story(rng: Random) -> Turn:
    index = rng.randrange(len(words.ANIMALS))
    animal = words.ANIMALS[index]
    asked = [
        f"Tell me a story about a {animal}.",
        f"Write a story about a {animal}.",
        f"I want a story about a {animal}.",
    ]
    if animal == "fox":
        asked += ["Tell me a story.", "Write a short story.", "Can you tell me a story?"] * 2
    return casual(rng, rng.choice(asked)), _PLOTS[index % len(_PLOTS)].replace("{a}", animal)


def _repeat(rng: Random) -> Turn:
    pool = rng.choice((words.LOOSE, words.OBJECTS, words.THINGS, None))
    length = rng.randint(1, 10)
    said = [words.invented_word(rng) if pool is None else rng.choice(pool) for _ in range(length)]
    if rng.random() < 0.4:
        said.insert(rng.randrange(length), words.code(rng))
    text = filler(rng) if rng.random() < 0.3 else " ".join(said)
    return rng.choice(("Repeat after me: {t}", "Repeat this: {t}", "Say this: {t}", "Copy this: {t}")).replace(
        "{t}", text
    ), text

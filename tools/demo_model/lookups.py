"""Look-ups in a long context: facts hidden among distractors and filler, questions, and the only right answers.

Lengths are asked from the caller's `measure`, so this file knows no tokenizer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tools.demo_model import lexicon as words

Measure = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Relation:
    """One kind of fact: `{k}` is what is asked about, `{a}` which property of it, `{v}` the value to find."""

    facts: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str
    missing: str


@dataclass(frozen=True, slots=True)
class Fact:
    relation: str
    key: str
    attribute: str
    value: str

    def fill(self, template: str) -> str:
        return template.replace("{k}", self.key).replace("{a}", self.attribute).replace("{v}", self.value)


@dataclass(frozen=True, slots=True)
class Passage:
    text: str
    facts: tuple[Fact, ...]
    absent: tuple[Fact, ...]  # plausible facts that the text does not state


RELATIONS = {
    "code": Relation(
        facts=(
            "The {a} of the {k} is {v}.",
            "The {a} of the {k} is {v}.",
            "The {a} for the {k} is {v}.",
            "The {k} has the {a} {v}.",
            "The {k} opens with the {a} {v}.",
            "Remember that the {a} of the {k} is {v}.",
            "Note: the {k} has the {a} {v}.",
            "The {k}: {a} {v}.",
            "Somebody changed the {a} of the {k} to {v}.",
            "{v} is the {a} of the {k}.",
            "The {k}'s {a} is {v}.",
            "Use the {a} {v} for the {k}.",
            "{a} of the {k}: {v}.",
        ),
        questions=(
            "What is the {a} of the {k}?",
            "What is the {a} of the {k}?",
            "What is the {a} for the {k}?",
            "What's the {a} of the {k}?",
            "Which {a} does the {k} have?",
            "Tell me the {a} of the {k}.",
            "Can you tell me the {a} of the {k}?",
            "I forgot the {a} of the {k}. What is it?",
            "I need the {a} of the {k}.",
            "Do you remember the {a} of the {k}?",
            "The {a} of the {k}?",
            "Look up the {a} of the {k}.",
            "What is the {k}'s {a}?",
            "Which {a} opens the {k}?",
            "How do I open the {k}? Give me the {a}.",
        ),
        answer="The {a} of the {k} is {v}.",
        missing="I cannot find the {a} of the {k} in the text.",
    ),
    "place": Relation(
        facts=("The {k} is in the {v}.", "You can find the {k} in the {v}.", "Somebody put the {k} in the {v}."),
        questions=("Where is the {k}?", "Where can I find the {k}?", "In which place is the {k}?"),
        answer="The {k} is in the {v}.",
        missing="I cannot find the place of the {k} in the text.",
    ),
    "owner": Relation(
        facts=("The {k} belongs to {v}.", "{v} owns the {k}.", "The owner of the {k} is {v}."),
        questions=("Who owns the {k}?", "Who is the owner of the {k}?", "Whose is the {k}?"),
        answer="The {k} belongs to {v}.",
        missing="I cannot find the owner of the {k} in the text.",
    ),
    "price": Relation(
        facts=(
            "The {k} costs {v} euros.",
            "The price of the {k} is {v} euros.",
            "Somebody sold the {k} for {v} euros.",
        ),
        questions=("How much does the {k} cost?", "What is the price of the {k}?", "How much is the {k}?"),
        answer="The {k} costs {v} euros.",
        missing="I cannot find the price of the {k} in the text.",
    ),
    "home": Relation(
        facts=("{k} lives in {v}.", "{k} has a house in {v}.", "The home of {k} is in {v}."),
        questions=("Where does {k} live?", "In which city does {k} live?", "Where is the home of {k}?"),
        answer="{k} lives in {v}.",
        missing="I cannot find the home of {k} in the text.",
    ),
    "number": Relation(
        facts=("The {a} of {k} is {v}.", "{k} has the {a} {v}.", "{k}'s {a} is {v}."),
        questions=("What is the {a} of {k}?", "What is {k}'s {a}?", "Tell me the {a} of {k}."),
        answer="The {a} of {k} is {v}.",
        missing="I cannot find the {a} of {k} in the text.",
    ),
    "favourite": Relation(
        facts=("The favourite {a} of {k} is {v}.", "{k}'s favourite {a} is {v}."),
        questions=(
            "What is {k}'s favourite {a}?",
            "What is the favourite {a} of {k}?",
            "Which {a} does {k} like best?",
        ),
        answer="{k}'s favourite {a} is {v}.",
        missing="I cannot find the favourite {a} of {k} in the text.",
    ),
    "day": Relation(
        facts=("The meeting with {k} is on {v}.", "{k} comes to the meeting on {v}."),
        questions=("When is the meeting with {k}?", "On which day is the meeting with {k}?"),
        answer="The meeting with {k} is on {v}.",
        missing="I cannot find the meeting with {k} in the text.",
    ),
}
_CODE_ATTRIBUTES = ("code",) * 12 + ("PIN", "number", "secret code", "access code", "serial number", "password")
_PERSON_NUMBERS = ("phone number", "room number", "badge number", "code", "locker number")
_OBJECT_KEYED = {"code", "place", "owner", "price"}
_MENTIONS = (
    "The {k} is very old.",
    "Nobody looked at the {k} today.",
    "The {k} was made a long time ago.",
    "A {p} talked about the {k}.",
    "Everybody likes the {k}.",
)


def passage(rng: Random, *, num_tokens: int, measure: Measure, relations: tuple[str, ...] | None = None) -> Passage:
    """Prose or a list of about `num_tokens` tokens in which every fact is stated exactly once."""
    chosen = relations or _some_relations(rng)
    density = rng.choice((1.0, 0.7, 0.4, 0.2, 0.1))
    facts = _FactSource(rng, chosen, num_tokens)
    stated: list[Fact] = [next(facts)]
    absent = [next(facts) for _ in range(2)]
    sentences = [_state(rng, stated[0])]
    separator = rng.choice((" ", " ", " ", "\n", "\n- "))
    used = measure(sentences[0])
    while used < num_tokens:
        if rng.random() < density:
            stated.append(next(facts))
            sentence = _state(rng, stated[-1])
        else:
            sentence = filler(rng, mention=rng.choice(stated).key if rng.random() < 0.15 else None)
        sentences.append(sentence)
        used += measure(" " + sentence) + (separator != " ")
    rng.shuffle(sentences)
    text = separator.join(sentences)
    return Passage("- " + text if separator == "\n- " else text, tuple(stated), tuple(absent))


def question(rng: Random, fact: Fact) -> str:
    return fact.fill(rng.choice(RELATIONS[fact.relation].questions))


def answer(fact: Fact, *, is_stated: bool = True) -> str:
    text = fact.fill(RELATIONS[fact.relation].answer if is_stated else RELATIONS[fact.relation].missing)
    return text[0].upper() + text[1:]


def filler(rng: Random, *, mention: str | None = None) -> str:
    """A sentence that states no fact anybody asks for."""
    pick = rng.choice
    if mention is not None and mention[0].islower():
        return pick(_MENTIONS).replace("{k}", mention).replace("{p}", pick(words.PEOPLE))
    form = rng.randrange(13)
    if form < 3:
        return f"The {pick(words.PEOPLE)} {pick(words.MOTIONS)} {pick(words.MANNERS)} to the {pick(words.PLACES)}."
    if form < 5:
        return (
            f"A {pick(words.PEOPLE)} {pick(words.DEEDS)} {rng.randint(2, 99)} {pick(words.THINGS)} {pick(words.TIMES)}."
        )
    if form == 5:
        return f"It was a {pick(words.WEATHER)} day in {pick(words.MONTHS)}, and the {pick(words.PLACES)} was quiet."
    if form == 6:
        return f"The {pick(words.ANIMALS)} slept near the {pick(words.PLACES)} {pick(words.TIMES)}."
    if form == 7:
        pair = f"{pick(words.NAMES)} and {pick(words.NAMES)}"
        return f"{pair} {pick(words.DEEDS)} the {pick(words.THINGS)} {pick(words.MANNERS)}."
    if form == 8:
        return f"Some people talked about {pick(words.THINGS)} and {pick(words.LOOSE)}, but nobody listened."
    if form == 9:
        return f"{invented_name(rng)} {pick(words.DEEDS)} the {words.invented_word(rng)} {pick(words.TIMES)}."
    return _prose(rng) if form < 12 else f'{pick(words.NAMES)} said: "{_prose(rng)}"'


def _prose(rng: Random) -> str:
    """Words in the proportions of prose, without sense: real text must not distract the model either."""
    chosen: list[str] = []
    for _ in range(rng.randint(4, 22)):
        pool = rng.random()
        if pool < 0.45:
            chosen.append(rng.choice(words.LITTLE))
        elif pool < 0.8:
            chosen.append(rng.choice(words.LOOSE))
        elif pool < 0.9:
            chosen.append(rng.choice(words.OBJECTS + words.THINGS))
        elif pool < 0.97:
            chosen.append(words.invented_word(rng))
        else:
            chosen.append(str(rng.randrange(10 ** rng.randint(1, 4))))
        if rng.random() < 0.1:
            chosen[-1] += rng.choice((",", ",", ",", ";", ":", " -"))
    text = " ".join(chosen).rstrip(",;:- ")
    return text[0].upper() + text[1:] + rng.choice((".", ".", ".", "!", "?"))


def invented_name(rng: Random) -> str:
    return words.invented_word(rng).capitalize()


def _some_relations(rng: Random) -> tuple[str, ...]:
    if rng.random() < 0.55:
        return ("code",)
    return tuple(rng.sample(sorted(RELATIONS), k=rng.randint(1, 4)))


def _state(rng: Random, fact: Fact) -> str:
    text = fact.fill(rng.choice(RELATIONS[fact.relation].facts))
    return text[0].upper() + text[1:] if not text.startswith(fact.value) else text


class _FactSource:
    """Facts whose (relation, key, attribute) never repeat; keys share words, so that half a match misleads."""

    def __init__(self, rng: Random, relations: tuple[str, ...], num_tokens: int) -> None:
        self._rng = rng
        self._relations = relations
        self._seen: set[tuple[str, str]] = set()
        self._attributes = tuple(rng.sample(_CODE_ATTRIBUTES, k=rng.choice((1, 1, 1, 2, 3))))
        size = max(3, round((num_tokens / 8) ** 0.5 * rng.uniform(1.1, 2.5)))
        adjectives = words.COLOURS if rng.random() < 0.4 else words.COLOURS + words.ADJECTIVES
        self._adjectives = rng.sample(adjectives, k=min(size, len(adjectives)))
        self._objects = rng.sample(sorted(set(words.OBJECTS)), k=min(size, len(words.OBJECTS) // 2))
        self._style = rng.choices(("pair", "invented", "numbered", "long"), weights=(80, 8, 6, 6))[0]

    def __next__(self) -> Fact:
        for _ in range(1000):
            relation = self._rng.choice(self._relations)
            key = self._object_key() if relation in _OBJECT_KEYED else self._person_key()
            attribute = self._attribute(relation)
            kind = attribute if relation in ("code", "number", "favourite") else relation
            if (key, kind) not in self._seen:
                self._seen.add((key, kind))
                return Fact(relation, key, attribute, self._value(relation, attribute))
        raise AssertionError("the pools of words are too small for the length asked for")

    def _object_key(self) -> str:
        rng = self._rng
        key = f"{rng.choice(self._adjectives)} {rng.choice(self._objects)}"
        if len(self._seen) > 0.5 * len(self._adjectives) * len(self._objects) or self._style == "long":
            return f"{rng.choice(words.ADJECTIVES[:20])} {rng.choice(self._adjectives)} {rng.choice(self._objects)}"
        if self._style == "invented":
            return rng.choice((f"{words.invented_word(rng)} {rng.choice(self._objects)}", words.invented_word(rng)))
        if self._style == "numbered":
            return f"{rng.choice(self._objects)} {rng.choice('ABCDE') if rng.random() < 0.3 else rng.randint(1, 99)}"
        return key

    def _person_key(self) -> str:
        if self._rng.random() < 0.12 or len(self._seen) > 40:
            return invented_name(self._rng)
        return self._rng.choice(words.NAMES)

    def _attribute(self, relation: str) -> str:
        if relation == "code":
            return self._rng.choice(self._attributes)
        if relation == "number":
            return self._rng.choice(_PERSON_NUMBERS)
        return self._rng.choice(sorted(words.FAVOURITES)) if relation == "favourite" else ""

    def _value(self, relation: str, attribute: str) -> str:
        rng = self._rng
        match relation:
            case "code" if attribute == "password":
                return rng.choice((rng.choice(words.PASSWORDS), words.invented_word(rng)))
            case "code" | "number":
                return words.code(rng)
            case "price":
                return str(rng.randint(2, 999))
            case "favourite":
                return rng.choice(words.FAVOURITES[attribute])
        pools = {"place": words.PLACES, "owner": words.NAMES, "home": words.CITIES, "day": words.DAYS}
        return rng.choice(pools[relation])

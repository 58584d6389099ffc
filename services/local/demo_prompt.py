"""A made-up text for the demo: facts among filler, new each time, and questions with one right answer.

Lose one block of it on the way from prefill to decode and the answer is wrong.
"""

from dataclasses import dataclass
from random import Random

_KINDS = "red blue green black white yellow old soft rusty square".split()
_THINGS = "box clock lamp door robot purse radio flute hammer wallet".split()
_FACTS = (
    "The code of the {thing} is {code}.",
    "Remember that the code of the {thing} is {code}.",
    "Note: the {thing} has the code {code}.",
    "Use the code {code} for the {thing}.",
)
_FILLERS = (
    "The painter travelled together to the cellar.",
    "It was a stormy day in August, and the lobby was quiet.",
    "The driver drove often to the museum.",
    "The child went calmly to the office.",
)
NUM_FACTS = 62
"""Makes about 1,000 tokens of the demo model."""


@dataclass(frozen=True, slots=True)
class Fact:
    thing: str
    code: str

    @property
    def question(self) -> str:
        return f"What is the code of the {self.thing}?"


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    text: str
    facts: list[Fact]
    """In the order of the text."""


def make_demo_prompt(random: Random) -> DemoPrompt:
    things = random.sample([f"{kind} {thing}" for kind in _KINDS for thing in _THINGS], NUM_FACTS)
    codes = random.sample(range(1000, 10_000), NUM_FACTS)
    facts = [Fact(thing, str(code)) for thing, code in zip(things, codes, strict=True)]
    sentences: list[str] = []
    for number, fact in enumerate(facts):
        sentences.append(random.choice(_FACTS).format(thing=fact.thing, code=fact.code))
        if number % 6 == 5:
            sentences.append(random.choice(_FILLERS))
    return DemoPrompt(" ".join(sentences), facts)

"""Conversations and their token ids, each a function of the random stream alone. Knows no model and no tensor."""

from collections.abc import Iterator
from random import Random

from tools.demo_model import lookups
from tools.demo_model.arithmetic import sum_turn
from tools.demo_model.chat import casual, chat_turn, name_turns
from tools.demo_model.phrases import REFUSAL
from tools.demo_model.tokenization import BEGIN, END, FORCED, ROLES, Encoder
from tools.demo_model.tool_chats import Message, tool_conversation
from tools.demo_model.tool_specs import ask, offer_tools

CONTEXT, ANSWER = 1, 2  # what a token is to the loss

TOOL_SHARES = {128: 0.0, 256: 0.55, 512: 0.6, 1024: 0.25, 2048: 0.08}
"""Shares of conversations with tools, by the length of the row."""

_INTROS = (
    "",
    "",
    "",
    "",
    "Read this text: ",
    "Here is a list:\n",
    "Remember the following.\n",
    "Text:\n",
    "Notes:\n",
    "Some facts:\n",
)
_LINKS = ("\n\n", "\n", " ", "\n\nQuestion: ", "\nQuestion: ", "\n\nNow tell me: ")
_SYSTEMS = (
    "You are a helpful assistant.",
    "You are Baton's demo model.",
    "Answer with the facts in the text.",
    "Be brief.",
)
_PREFACES = ("Answer from the text. ", "You are a helpful assistant. ", "Use this text: ")


def encode(encoder: Encoder, messages: list[Message]) -> tuple[list[int], list[int]]:
    """Token ids exactly as the chat template gives them, and what each is to the loss."""
    ids, kinds = [encoder.ids[BEGIN]], [CONTEXT]
    for role, content in messages:
        text = [*encoder.encode(content), encoder.ids[END]]
        is_forced = role == FORCED
        ids += [encoder.ids[ROLES["assistant" if is_forced else role]], *text]
        marks = [ANSWER if is_forced or role == "assistant" else CONTEXT] * len(text)
        # A grammar chooses the first token of a forced answer. The model must not learn to choose it by itself.
        kinds += [CONTEXT, *([CONTEXT, *marks[1:]] if is_forced else marks)]
    return ids, kinds


def conversation(rng: Random, encoder: Encoder, *, num_tokens: int) -> list[Message]:
    """Turns until the next one would not fit into `num_tokens`."""
    if rng.random() < TOOL_SHARES.get(num_tokens, 0.0):
        return tool_conversation(rng, encoder, num_tokens=num_tokens)
    is_lookup = num_tokens > 256 or rng.random() < 0.4
    if is_lookup:
        messages, turns = _about_a_passage(rng, encoder, num_tokens)
    else:
        messages, turns = _maybe_system(rng), _small_talk(rng)
    used = len(encode(encoder, messages)[0])
    if used > num_tokens:  # a long-winded passage: another one
        return conversation(rng, encoder, num_tokens=num_tokens)
    for said, reply in turns:
        used += len(encoder.encode(said)) + len(encoder.encode(reply)) + 4
        if used > num_tokens:
            break
        messages += [("user", said), ("assistant", reply)]
    return messages


def lookup(rng: Random, encoder: Encoder, *, num_tokens: int, relations: tuple[str, ...] | None = ("code",),
           is_stated: bool = True) -> tuple[list[Message], lookups.Fact]:  # fmt: skip
    """A fresh question about one passage of `num_tokens` tokens; the last message is the right answer."""
    text = lookups.passage(rng, num_tokens=num_tokens - 20, measure=encoder.measure, relations=relations)
    fact = rng.choice(text.facts if is_stated else text.absent)
    messages = _place(rng, text.text, lookups.question(rng, fact))
    return [*messages, ("assistant", lookups.answer(fact, is_stated=is_stated))], fact


def _about_a_passage(rng: Random, encoder: Encoder, num_tokens: int) -> tuple[list[Message], Iterator[tuple[str, str]]]:
    share = rng.uniform(0.35, 0.8) if num_tokens <= 256 else rng.uniform(0.4, 0.93)
    text = lookups.passage(rng, num_tokens=round(share * num_tokens) - 24, measure=encoder.measure)
    turns = _questions(rng, text)
    said, reply = next(turns)
    return [*_place(rng, text.text, said), ("assistant", reply)], turns


def _place(rng: Random, text: str, asked: str) -> list[Message]:
    """The passage and the question, in the arrangements people use."""
    kind = rng.random()
    if kind < 0.6:
        return [*_maybe_system(rng), ("user", rng.choice(_INTROS) + text + rng.choice(_LINKS) + asked)]
    if kind < 0.75:
        return [("system", (rng.choice(_PREFACES) if rng.random() < 0.5 else "") + text), ("user", asked)]
    if kind < 0.9:
        return [
            *_maybe_system(rng),
            ("user", rng.choice(_INTROS) + text),
            ("assistant", "OK, I have read it."),
            ("user", asked),
        ]
    return [*_maybe_system(rng), ("user", f"{asked}\n\n{text}")]


def _maybe_system(rng: Random) -> list[Message]:
    if rng.random() < 0.8:
        return []
    return [("system", rng.choice(_SYSTEMS) if rng.random() < 0.7 else lookups.filler(rng))]


def _questions(rng: Random, text: lookups.Passage) -> Iterator[tuple[str, str]]:
    facts = list(text.facts)
    rng.shuffle(facts)
    for fact in facts:
        kind = rng.random()
        if kind < 0.06:
            missing = rng.choice(text.absent)
            yield lookups.question(rng, missing), lookups.answer(missing, is_stated=False)
        elif kind < 0.09:
            yield chat_turn(rng)
        asked = lookups.question(rng, fact)
        yield casual(rng, asked) if fact.key[0].islower() else asked, lookups.answer(fact)
    yield from _small_talk(rng)


def _small_talk(rng: Random) -> Iterator[tuple[str, str]]:
    sums = rng.choice((0.0, 0.4, 1.0))
    told, asked = name_turns(rng) if rng.random() < 0.15 else (None, None)
    while True:
        if told is not None:
            yield told
            told = None
        elif asked is not None and rng.random() < 0.4:
            yield asked
            asked = None
        yield _without_tools(rng) if rng.random() < 0.03 else sum_turn(rng) if rng.random() < sums else chat_turn(rng)


def _without_tools(rng: Random) -> tuple[str, str]:
    """Return a request for a tool although none is offered."""
    while (tool := offer_tools(rng, 1)[0]).is_answered_without or not tool.questions:
        pass
    return ask(rng, tool).text, REFUSAL

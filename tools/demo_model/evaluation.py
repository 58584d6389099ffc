"""Generate fresh questions and grade the model on them in two ways.

The quick way feeds the right answers: each token must be the model's first choice. The real way generates greedily
with transformers through the chat template of the saved folder.
"""

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.demo_model.arithmetic import sum_turn
from tools.demo_model.batches import Layout
from tools.demo_model.chat import chat_turn
from tools.demo_model.corpus import ANSWER, encode, lookup
from tools.demo_model.lookups import RELATIONS
from tools.demo_model.network import TrainingForward
from tools.demo_model.tokenization import PAD, WordEncoder
from tools.demo_model.tool_chats import Message, no_fit_turn, small_talk, tool_exchange, tools_block
from tools.demo_model.tool_specs import offer_tools

SHOWN = (
    "Hello!", "Who are you?", "What is Baton?", "What can you do?", "What is the capital of France?",
    "What is 12 + 30?", "347 + 285", "What is 7 times 8?",
    "Count from 1 to 12.", "Tell me a story about a fox.", "what is a kv cache",
    "Explain quantum physics.",
    "The code of the blue box is 4812. The code of the red box is 7730. What is the code of the blue box?",
    "Repeat after me: the green lamp is 42", "My name is Anna.", "Thanks, bye!",
)  # fmt: skip


ToolKind = Literal["call", "call, 8 tools", "parallel calls", "tool answer", "no call"]
TOOL_KINDS: tuple[ToolKind, ...] = get_args(ToolKind)


@dataclass(frozen=True, slots=True)
class Question:
    messages: list[Message]  # without the answer
    answer: str


@dataclass(frozen=True, slots=True)
class Mistake:
    question: Question
    reply: str


def questions(encoder: WordEncoder, *, seed: str, count: int) -> dict[str, list[Question]]:
    """Return named sets of fresh questions, from random streams that training batches do not use."""
    sets: dict[str, list[Question]] = {}
    for name, tokens in (("lookup 200", 200), ("lookup 1000", 1000), ("lookup 1500", 1500)):
        rng = Random(f"{seed}/{name}")
        sets[name] = [_question(lookup(rng, encoder, num_tokens=tokens)[0]) for _ in range(count)]
    rng = Random(f"{seed}/relations")
    mixed = tuple(sorted(RELATIONS))
    sets["relations 1000"] = [
        _question(lookup(rng, encoder, num_tokens=1000, relations=mixed)[0]) for _ in range(count)
    ]
    rng = Random(f"{seed}/absent")
    sets["absent 1000"] = [_question(lookup(rng, encoder, num_tokens=1000, is_stated=False)[0]) for _ in range(count)]
    for name, turn in (("chat", chat_turn), ("sums", sum_turn)):
        rng = Random(f"{seed}/{name}")
        sets[name] = [Question([("user", said)], reply) for said, reply in (turn(rng) for _ in range(count))]
    for kind in TOOL_KINDS:
        rng = Random(f"{seed}/{kind}")
        sets[kind] = [tool_question(rng, kind) for _ in range(count)]
    return sets


def tool_question(rng: Random, kind: ToolKind) -> Question:
    """Return a question with tools: for a call of one of one to three tools or of eight, for several calls, for what a
    tool has returned, or a question that no tool answers."""
    tools = offer_tools(rng, 8 if kind == "call, 8 tools" else rng.randint(1, 3))
    system = ("system", tools_block([tool.function for tool in tools]))
    if kind == "no call":
        while (turn := no_fit_turn(rng, tools) if rng.random() < 0.5 else small_talk(rng, tools)) is None:
            pass
        return Question([system, ("user", turn[0])], turn[1])
    messages = tool_exchange(rng, tools, is_parallel=kind == "parallel calls").messages()
    last = len(messages) if kind == "tool answer" else 2
    return _question([system, *messages[:last]])


def forced_accuracy(
    forward: TrainingForward, encoder: WordEncoder, asked: list[Question], device: torch.device
) -> float:
    """Return the fraction of answers of which each token, including the end token, is the most likely one. This equals
    the exact-match rate of greedy generation."""
    rows = [encode(encoder, [*q.messages, ("assistant", q.answer)]) for q in asked]
    length = max(len(ids) for ids, _ in rows)
    tokens = torch.full((len(rows), length), encoder.ids[PAD])
    kinds = torch.zeros((len(rows), length), dtype=torch.uint8)
    for row, (ids, marks) in enumerate(rows):
        last = len(ids) - 1 - marks[::-1].index(1)  # only the last reply counts: earlier ones are given
        tokens[row, : len(ids)] = torch.tensor(ids)
        kinds[row, last + 1 : len(ids)] = ANSWER
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type != "cpu"):
        hidden = forward.hidden(tokens.flatten().to(device), Layout(((length, len(rows)),)))
        chosen = forward.predictions(hidden).view(len(rows), length).cpu()
    is_right = (chosen[:, :-1] == tokens[:, 1:]) | (kinds[:, 1:] != ANSWER)
    return is_right.all(dim=1).float().mean().item()


class Judge:
    """Generates with transformers from a saved folder, greedily and through its chat template."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()

    def reply(self, conversations: list[list[Message]], *, max_new_tokens: int = 40) -> list[str]:
        """Return the answers. An answer that the model ended by itself has the end token at its end."""
        prompts = [[{"role": role, "content": text} for role, text in messages] for messages in conversations]
        inputs = self.tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
        ).to(self.model.device)
        with torch.no_grad():
            ids = self.model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
        texts: list[str] = self.tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :])
        return [text.split(PAD)[0] for text in texts]

    def mistakes(self, asked: list[Question], *, batch: int = 150) -> list[Mistake]:
        """Return the answers that are not exactly right, including the end token."""
        wrong: list[Mistake] = []
        for start in range(0, len(asked), batch):
            part = asked[start : start + batch]
            replies = self.reply([q.messages for q in part], max_new_tokens=160)
            pairs = zip(part, replies, strict=True)
            wrong += [Mistake(q, text) for q, text in pairs if text != q.answer + self.tokenizer.eos_token]
        return wrong


def _question(messages: list[Message]) -> Question:
    return Question(messages[:-1], messages[-1][1])

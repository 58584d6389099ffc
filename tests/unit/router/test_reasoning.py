"""Reasoning in what models write, whole and in pieces."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_serve.services.router.text.reasoning import REASONING_FORMATS
from baton_serve.services.router.text.scanning.message_parts import Content, Part, Reasoning, merged
from tests.unit.router.test_tool_calls import cut

ASKS = "<|im_start|>assistant\n"
OPEN = "<|im_start|>assistant\n<think>\n"
OVER = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
TO_A_TOOL = '<|start|>assistant to=functions.f<|channel|>commentary<|message|>{"a": 1}<|call|>'


def read(name: str, prompt: str, pieces: Sequence[str]) -> list[Part]:
    reader = REASONING_FORMATS[name].reader(prompt)
    parts = [part for piece in pieces for part in reader.push(piece)]
    return merged(parts + reader.finish())


EXAMPLES = [
    ("deepseek_r1", ASKS, "<think>\nHm.\n\nSo.\n</think>\n\nYes.\n", "Hm.\n\nSo.", "Yes.\n"),
    ("deepseek_r1", ASKS, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("deepseek_r1", ASKS, "Hm, that is", "Hm, that is", ""),
    ("deepseek_r1", OVER, "Yes.", "", "Yes."),
    ("qwen3", ASKS, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("qwen3", ASKS, "\n\nYes.", "", "\n\nYes."),
    ("qwen3", ASKS, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    ("qwen3", OPEN, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("qwen3", OVER, "Yes, <think> is a tag.", "", "Yes, <think> is a tag."),
    ("mistral", ASKS, "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
    (
        "gpt_oss",
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        "Hm.",
        "Yes.",
    ),
    ("gpt_oss", "", "<|channel|>analysis<|message|>Hm.<|end|>" + TO_A_TOOL, "Hm.", TO_A_TOOL),
]


@pytest.mark.parametrize(("name", "prompt", "text", "reasoning", "content"), EXAMPLES)
def test_known_examples_are_read(name: str, prompt: str, text: str, reasoning: str, content: str) -> None:
    expected: list[Part] = [Reasoning(reasoning)] if reasoning else []
    expected += [Content(content)] if content else []
    assert read(name, prompt, [text]) == expected
    assert read(name, prompt, list(text)) == expected


HARMONY = "<|start|>user<|message|>Hm?<|end|><|start|>assistant<|channel|>{}<|message|>So far"
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"

CONTINUED = [
    ("qwen3", ASKS, "<think>\nHm, that", " is.\n</think>\n\nYes.", " is.", "Yes."),
    ("qwen3", ASKS, "<think>\nHm.\n</think>\n\nYes", ", <think> it is.", "", ", <think> it is."),
    ("qwen3", OPEN, "Hm, that", " is.</think>Yes.", " is.", "Yes."),
    ("qwen3", ASKS, "Yes", "<think>, so</think>.", "", "<think>, so</think>."),
    ("deepseek_r1", ASKS, "Yes", ", it is.", "", ", it is."),
    ("deepseek_r1", ASKS, "<think>Hm, that", " is.</think>Yes.", " is.", "Yes."),
    ("mistral", ASKS, "[THINK]Hm, that", " is.[/THINK]Yes.", " is.", "Yes."),
]


@pytest.mark.parametrize(("name", "prompt", "begun", "text", "reasoning", "content"), CONTINUED)
def test_a_continued_answer_is_read_from_the_state_that_its_beginning_leaves(
    name: str, prompt: str, begun: str, text: str, reasoning: str, content: str
) -> None:
    end = REASONING_FORMATS[name].prompt_end(prompt + begun, begun)
    expected: list[Part] = [Reasoning(reasoning)] if reasoning else []
    assert read(name, end, [text]) == read(name, end, list(text)) == [*expected, Content(content)]


def test_a_continued_message_of_harmony_goes_on_in_its_channel() -> None:
    assert read("gpt_oss", HARMONY.format("analysis"), [", so" + FINAL]) == [Reasoning(", so"), Content("Yes.")]
    assert read("gpt_oss", HARMONY.format("final"), list(", so<|return|>")) == [Content(", so")]


def test_quoted_tags_of_a_user_say_nothing() -> None:
    prompt = "<|im_start|>user\n<think>\n<|im_end|>\n<|im_start|>assistant\nYes"
    assert read("qwen3", REASONING_FORMATS["qwen3"].prompt_end(prompt, "Yes"), [", no"]) == [Content(", no")]


SNIPPETS = [
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    "<|channel|>analysis<|message|>",
    "<|end|>",
    "<|start|>",
    "\n",
]
anything = st.lists(st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=5))).map("".join)


@pytest.mark.parametrize("name", sorted(REASONING_FORMATS))
@settings(max_examples=20, deadline=None)
@given(text=anything, prompt=st.sampled_from([ASKS, OPEN, OVER, ""]), places=st.lists(st.integers(0, 100)))
def test_any_text_in_any_pieces_is_read_alike(name: str, text: str, prompt: str, places: list[int]) -> None:
    assert read(name, prompt, cut(text, places)) == read(name, prompt, [text])

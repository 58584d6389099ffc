"""Reasoning parsers (`--reasoning-parser`): formats of reasoning in generated text. Reasoning is removed before the
rest is searched for tool calls.

To add a format of two tags, add one line to `REASONING_FORMATS`; any other format also needs a module with its scan.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from baton_serve.contracts.lark import Lark
from baton_serve.services.router.text.reasoning.gpt_oss import gpt_oss, gpt_oss_rule
from baton_serve.services.router.text.reasoning.tagged import tagged, tagged_rule
from baton_serve.services.router.text.scanning.characters import Characters, Scan
from baton_serve.services.router.text.scanning.message_parts import PartReader, Parts

__all__ = ["REASONING_FORMATS", "ReasoningFormat"]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """One format in which models write their reasoning, such as text between `<think>` and `</think>`. Its functions
    get the rendered prompt, which may already begin or end the reasoning.
    """

    scan: Callable[[Characters, Parts, str], Scan[None]]
    """Splits a text into reasoning and content."""
    rule: Callable[[Lark, str], str]
    """Returns the grammar expression for the reasoning that may precede an answer with a grammar of its own."""
    has_special_tokens: bool = False
    """Whether the markers are special tokens, which the detokenizer must then keep in the text."""
    tags: tuple[str, str] | None = None
    """The opening and the closing tag, for a format of two tags."""

    def prompt_end(self, prompt: str, begun: str) -> str:
        """Return the prompt, cut so that its end shows whether the model continues with reasoning or with content.

        `begun` is the text of the message that the model continues (`continue_final_message`), with which the prompt
        ends. The prompt is cut after the last tag in `begun`. If `begun` has no tag, it is content, unless the template
        has put the opening tag before it.
        """
        end, begun = prompt.rstrip(), begun.rstrip()
        if self.tags is None or not begun or not end.endswith(begun):
            return prompt
        start = len(end) - len(begun)
        if last := max(at + len(tag) if (at := end.rfind(tag, start)) >= 0 else 0 for tag in self.tags):
            return end[:last]
        before = end[:start].rstrip()
        return before if before.endswith(self.tags) else before + self.tags[1]

    def reader(self, prompt: str) -> PartReader:
        """Return a new `PartReader` that separates reasoning and content in an answer to the rendered chat `prompt`."""
        return PartReader(lambda text, out: self.scan(text, out, prompt))


def _tagged(first: str, last: str, *, is_assumed: bool = False, has_special_tokens: bool = False) -> ReasoningFormat:
    tags = (first, last)
    return ReasoningFormat(
        partial(tagged, tags=tags, is_assumed=is_assumed),
        partial(tagged_rule, tags=tags, is_assumed=is_assumed),
        has_special_tokens,
        tags,
    )


REASONING_FORMATS = {
    # Answers of DeepSeek-R1 begin with reasoning, often without the opening tag.
    "deepseek_r1": _tagged("<think>", "</think>", is_assumed=True),
    "deepseek_v3": _tagged("<think>", "</think>"),
    "glm45": _tagged("<think>", "</think>"),
    "gpt_oss": ReasoningFormat(gpt_oss, gpt_oss_rule, has_special_tokens=True),
    "mistral": _tagged("[THINK]", "[/THINK]", has_special_tokens=True),
    "qwen3": _tagged("<think>", "</think>"),
}
"""The formats by the value of `--reasoning-parser`; the names are vLLM's."""

"""Reasoning in generated text: one line a format. It is taken out before calls of tools are looked for."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from baton_serve.services.router.text.grammar.lark import Lark
from baton_serve.services.router.text.reasoning.gpt_oss import gpt_oss, gpt_oss_rule
from baton_serve.services.router.text.reasoning.tagged import tagged, tagged_rule
from baton_serve.services.router.text.scanning.characters import Characters, Scan
from baton_serve.services.router.text.scanning.parts import PartReader, Parts

__all__ = ["REASONING_FORMATS", "ReasoningFormat"]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """`rule`: what may come before an answer that must have a form. `has_special_tokens`: its markers are special
    tokens, which must not be left out of the text."""

    scan: Callable[[Characters, Parts, str], Scan[None]]
    rule: Callable[[Lark, str], str]
    has_special_tokens: bool = False
    tags: tuple[str, str] | None = None

    def prompt_end(self, prompt: str, begun: str) -> str:
        """`prompt`, cut after the last tag of `begun`, the text of the answer with which it ends: that tag tells what
        follows. Without any, `begun` is the answer proper, unless the template has put the first tag before it."""
        end, begun = prompt.rstrip(), begun.rstrip()
        if self.tags is None or not begun or not end.endswith(begun):
            return prompt
        start = len(end) - len(begun)
        if last := max(at + len(tag) if (at := end.rfind(tag, start)) >= 0 else 0 for tag in self.tags):
            return end[:last]
        before = end[:start].rstrip()
        return before if before.endswith(self.tags) else before + self.tags[1]

    def reader(self, prompt: str) -> PartReader:
        """`prompt` is the rendered chat: its end may have begun the reasoning, or ended it."""
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
    "deepseek_r1": _tagged("<think>", "</think>", is_assumed=True),
    "deepseek_v3": _tagged("<think>", "</think>"),
    "glm45": _tagged("<think>", "</think>"),
    "gpt_oss": ReasoningFormat(gpt_oss, gpt_oss_rule, has_special_tokens=True),
    "mistral": _tagged("[THINK]", "[/THINK]", has_special_tokens=True),
    "qwen3": _tagged("<think>", "</think>"),
}

"""Reasoning parsers with two tags (`<think>`): decide where reasoning begins and ends; gpt-oss has a file of its own.
The prompt may already end with one of the tags.
"""

from baton_serve.contracts.lark import Lark
from baton_serve.services.router.text.scanning.characters import Characters, Scan, literal, skip_space, until
from baton_serve.services.router.text.scanning.message_parts import Parts


def tagged(text: Characters, out: Parts, prompt: str, *, tags: tuple[str, str], is_assumed: bool) -> Scan[None]:
    """Divide an answer into reasoning, up to the closing tag, and content, and emit them to `out`. `tags` are the
    opening and the closing tag.

    With `is_assumed`, an answer without the opening tag is reasoning too, unless the prompt ends with the closing tag.
    """
    first, last = tags
    end = prompt.rstrip()
    if end.endswith(last):
        return
    text.mark()
    text.back((yield from skip_space(text)))
    # A model may repeat the opening tag although the prompt ends with it.
    begins = yield from literal(text, first)
    is_open = end.endswith(first)
    if not begins and (is_open or not is_assumed):
        text.back(text.since_mark())
        if not is_open:
            return
        out.within_reasoning()
    if (yield from until(text, out.reasoning, (last,))):
        text.back((yield from skip_space(text)))


def tagged_rule(lark: Lark, prompt: str, *, tags: tuple[str, str], is_assumed: bool) -> str:
    """Return the grammar expression for the reasoning before an answer that follows a grammar. It is empty if the
    prompt ends with the closing tag, so that no reasoning can follow.
    """
    first, last = tags
    end = prompt.rstrip()
    if end.endswith(last):
        return ""
    begins, ends = lark.literal(first), f"{lark.text_up_to(last)} (/[ \\n]{{1,8}}/)?"
    if is_assumed or end.endswith(first):
        return f"({begins})? {ends}"
    return f"({begins} {ends})?"

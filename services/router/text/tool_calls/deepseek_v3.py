"""Tool parser of DeepSeek V3, R1 and V3.1.

V3 and R1 write `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, a newline, and the arguments in a code fence of JSON;
V3.1 writes `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}`. Both end a call with `<｜tool▁call▁end｜>`.
"""

import re

from baton_serve.services.router.text.scanning.characters import Characters, Scan, collect, skip_space, until
from baton_serve.services.router.text.scanning.json_text import json_value
from baton_serve.services.router.text.scanning.message_parts import Parts
from baton_serve.services.router.text.tool_calls.parameter_types import Tools

ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001

_NAME = re.compile(r"[\w.\-]+")
_FENCE = re.compile(r"\s*(```)?\s*")


def deepseek_v3(text: Characters, out: Parts, tools: Tools) -> Scan[None]:
    """Divide an answer in either format of DeepSeek V3 into content and tool calls, and emit them to `out`."""
    is_called = False
    while marker := (yield from until(text, out.content, (ALL_BEGIN, ALL_END, BEGIN, END))):
        if marker == ALL_BEGIN:
            out.markup(ALL_BEGIN)
        elif marker == BEGIN:
            out.markup(BEGIN)
            text.mark()
            is_called = yield from _call(text, out)
            if not is_called:
                out.content(text.since_mark())
        elif not is_called:
            out.content(marker)


def _call(text: Characters, out: Parts) -> Scan[bool]:
    kind, end = yield from collect(text, (SEPARATOR, END), longest=256)
    if end != SEPARATOR:
        text.back(end)
        return False
    char = yield from skip_space(text)
    text.back(char)
    name = kind.strip()
    # V3.1 has the arguments right after the separator. V3 has the name there, and `kind` is "function".
    if char != "{":
        header, end = yield from collect(text, ("{", END), longest=512)
        text.back(end)
        line, _, fence = header.partition("\n")
        name = line.strip()
        if end != "{" or fence.strip() not in ("", "```json", "```"):
            return False
    if not _NAME.fullmatch(name):
        return False
    out.begin(name)
    yield from json_value(text, out.arguments)
    # The end of the code fence belongs to the call; other text before the next marker is content.
    rest, end = yield from collect(text, (END, BEGIN, ALL_END))
    text.back(end)
    if not _FENCE.fullmatch(rest):
        out.content(rest)
    return True

"""Tool parser of Mistral.

Older models write `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`; models since tokenizer v11 write
`[TOOL_CALLS]name{…}` for each call. Versions between them write `[TOOL_CALLS]name[CALL_ID]id[ARGS]{…}`, whose id is
dropped.
"""

import re

from baton_serve.services.router.text.scanning.characters import Characters, Scan, collect, skip_space, until
from baton_serve.services.router.text.scanning.json_text import json_value
from baton_serve.services.router.text.scanning.message_parts import Parts
from baton_serve.services.router.text.tool_calls.call_object import call_list, call_object
from baton_serve.services.router.text.tool_calls.parameter_types import Tools

MARK = "[TOOL_CALLS]"

_HEADER = re.compile(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\]\s*[\w\-]+\s*)?(?:\[ARGS\]\s*)?")


def mistral(text: Characters, out: Parts, tools: Tools) -> Scan[None]:
    """Divide an answer into content and tool calls in any of Mistral's formats, and emit them to `out`."""
    while (yield from until(text, out.content, (MARK,))):
        out.markup(MARK)
        text.mark()
        char = yield from skip_space(text)
        text.back(char)
        if char == "[":
            is_called = yield from call_list(text, out)
        elif char == "{":
            is_called = yield from call_object(text, out)
        else:
            is_called = yield from _named(text, out)
        if not is_called:
            out.content(text.since_mark())


def _named(text: Characters, out: Parts) -> Scan[bool]:
    header, end = yield from collect(text, ("{",), longest=512)
    match = _HEADER.fullmatch(header)
    if not end or match is None:
        return False
    text.back(end)
    out.begin(match.group(1))
    yield from json_value(text, out.arguments)
    return True

"""Tool parser of Hermes 2 Pro, Hermes 3, Qwen 2.5 and Qwen 3.

An answer has any number of calls `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
"""

from baton_serve.services.router.text.scanning.characters import Characters, Scan, until
from baton_serve.services.router.text.scanning.message_parts import Parts
from baton_serve.services.router.text.tool_calls.call_object import call_object
from baton_serve.services.router.text.tool_calls.parameter_types import Tools

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def hermes(text: Characters, out: Parts, tools: Tools) -> Scan[None]:
    """Divide an answer in the Hermes format into content and tool calls, and emit them to `out`."""
    is_called = False
    while marker := (yield from until(text, out.content, (OPEN, CLOSE))):
        if marker == CLOSE:
            # A closing tag without a call before it is content.
            if not is_called:
                out.content(CLOSE)
            is_called = False
            continue
        out.markup(OPEN)
        text.mark()
        is_called = yield from call_object(text, out)
        if not is_called:
            out.content(text.since_mark())

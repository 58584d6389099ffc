"""Tool parser of Qwen3-Coder, in which values have no quotes.

A call is `<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>`. The tool's schema gives
the types of the values. Strings are streamed while they arrive, other values when they are complete.
"""

from baton_serve.services.router.text.scanning.characters import Characters, Scan, collect, until
from baton_serve.services.router.text.scanning.json_text import to_json
from baton_serve.services.router.text.scanning.message_parts import Parts
from baton_serve.services.router.text.tool_calls.parameter_types import Tools, json_of

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


def qwen3_coder(text: Characters, out: Parts, tools: Tools) -> Scan[None]:
    """Divide an answer in the XML format of Qwen3-Coder into content and tool calls, and emit them to `out`."""
    # Models sometimes leave out `<tool_call>`, so a call begins with `<function=`.
    is_called = False
    while marker := (yield from until(text, out.content, (OPEN, CLOSE, FUNCTION))):
        if marker == FUNCTION:
            is_called = yield from _function(text, out, tools)
        elif marker == OPEN:
            out.markup(OPEN)
        elif is_called:
            is_called = False
        else:
            out.content(CLOSE)


def _function(text: Characters, out: Parts, tools: Tools) -> Scan[bool]:
    name, end = yield from collect(text, (">", "\n", "<"), longest=256)
    if end != ">" or not name.strip():
        text.back(end)
        out.content(FUNCTION + name)
        return False
    tool = name.strip()
    out.begin(tool)
    out.arguments("{")
    separator = ""
    # The end of the text or any other tag ends the call: its arguments are always closed with a brace.
    while (yield from until(text, _ignore, (PARAMETER, FUNCTION_END, CLOSE))) == PARAMETER:
        key, end = yield from collect(text, (">", "\n"), longest=256)
        if not end:
            break
        out.arguments(f"{separator}{to_json(key.strip())}: ")
        separator = ", "
        if tools.is_string(tool, key.strip()):
            yield from _string(text, out)
        else:
            out.arguments(json_of((yield from _written(text))))
    out.arguments("}")
    return True


def _string(text: Characters, out: Parts) -> Scan[None]:
    """Read a string value up to its closing tag and emit it as JSON, without the newline after the opening tag and the
    one before the closing tag.
    """
    out.arguments('"')
    if (char := (yield from text.next())) != "\n":
        text.back(char)
    value = _Value(out)
    yield from until(text, value.push, (PARAMETER_END,))
    out.arguments('"')


class _Value:
    """Emits a string as JSON while it arrives. A newline is held back, because the last one does not belong to the
    string.
    """

    def __init__(self, out: Parts) -> None:
        self._out = out
        self._newline = ""

    def push(self, text: str) -> None:
        """Emit the next characters of the string, escaped for JSON."""
        for char in text:
            if char == "\n":
                char, self._newline = self._newline, char
            else:
                char, self._newline = self._newline + char, ""
            self._out.arguments(to_json(char)[1:-1])


def _written(text: Characters) -> Scan[str]:
    held: list[str] = []
    yield from until(text, held.append, (PARAMETER_END,))
    return "".join(held).removeprefix("\n").removesuffix("\n")


def _ignore(_: str) -> None:
    """Ignore the white space between the tags of a tool call."""

"""Llama 3.1 and later: an answer that is `{"name": …, "parameters": {…}}`, several parted by `;`.

Nothing marks a call but `<|python_tag|>`, which models leave out: only a text that begins with such an object is one.
"""

from baton_serve.services.router.text.scanning.characters import Characters, Scan, literal, skip_space
from baton_serve.services.router.text.scanning.parts import Parts
from baton_serve.services.router.text.tool_calls.call_object import call_object
from baton_serve.services.router.text.tool_calls.tools import Tools

TAG = "<|python_tag|>"


def llama3_json(text: Characters, out: Parts, tools: Tools) -> Scan[None]:
    text.mark()
    text.back((yield from skip_space(text)))
    yield from literal(text, TAG)
    while (yield from call_object(text, out, needs_arguments=True)):
        text.mark()
        char = yield from skip_space(text)
        if char not in (";", ",") and char != "{":
            text.back(char)
            return
        if char == "{":
            text.back(char)
    out.content(text.since_mark())

"""Tool parser of Llama 3.1 and later: an answer that is `{"name": …, "parameters": {…}}`.

Several calls are separated by `;`. The marker `<|python_tag|>` before a call is often left out by models, so a text has
calls if and only if it begins with such an object.
"""

from baton_serve.services.router.text.scanning.characters import Characters, Scan, literal, skip_space
from baton_serve.services.router.text.scanning.message_parts import Parts
from baton_serve.services.router.text.tool_calls.call_object import call_object
from baton_serve.services.router.text.tool_calls.parameter_types import Tools

TAG = "<|python_tag|>"


def llama3_json(text: Characters, out: Parts, tools: Tools) -> Scan[None]:
    """Read an answer in Llama 3's JSON format and emit it to `out`: it consists of tool calls only, otherwise all of it
    is content.
    """
    text.mark()
    text.back((yield from skip_space(text)))
    yield from literal(text, TAG)
    # Without a marker, an object that only has a name could be an ordinary answer in JSON.
    while (yield from call_object(text, out, needs_arguments=True)):
        text.mark()
        char = yield from skip_space(text)
        if char not in (";", ",") and char != "{":
            text.back(char)
            return
        if char == "{":
            text.back(char)
    out.content(text.since_mark())

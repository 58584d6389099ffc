"""Explains in one sentence, with cause and remedy, why llguidance has refused a grammar or schema.

Routers and workers compile the same grammars, so both explain its errors here. An error that is not known stays as it
is, without llguidance's marks.
"""

import re

_MARK = "<non-verbose/>"
"""Line at the end of errors of llguidance's parser. It stands for the grammar, which is not quoted."""

_UNENDING = (
    "the grammar or schema permits no text here, because a rule or $ref leads back to itself without an alternative"
    " that ends, or its conditions exclude each other; add such an alternative, or remove a condition"
)
_TOO_COMPLEX = (
    "the grammar or schema is too ambiguous or too complex for the text so far; use fewer alternatives that begin"
    " alike, shorter repetitions, and longer fixed texts"
)

_EXPLANATIONS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), explanation)
    for pattern, explanation in (
        (r"NoExtension(Bias)?$", _UNENDING),
        (r"parser error: Too many items .*$", _TOO_COMPLEX),
        (r"lexer error: too many .*$", _TOO_COMPLEX),
        (
            r"initial lexer configuration \(grammar\) too big .*$",
            "the grammar or schema is too large to be compiled; use fewer and shorter regular expressions",
        ),
        (
            r"circular references with sibling keys are not supported: json-schema:///(\S*)",
            r"the $ref '\1' leads back to itself and has other keys beside it, or stands in an allOf, which is not"
            r" supported; move these keys into the definition that it names",
        ),
        (
            r"Pointer '([^']*)' does not exist$",
            r"the $ref '#\1' names nothing in the schema; add the definition, or correct the reference",
        ),
        (
            r"Resource '([^']*)' is not present in a registry and retrieving it failed: .*$",
            r"the $ref '\1' points outside of the schema, and nothing is fetched; copy the definition into $defs, and"
            r" refer to it with '#/$defs/NAME'",
        ),
        (
            r"oneOf constraints are not supported\. Enable 'coerce_one_of' option to approximate oneOf with anyOf",
            "a oneOf whose alternatives overlap is not supported; use anyOf",
        ),
        (r"Unimplemented keys: (.*)$", r"the schema has keys that are not supported: \1; remove them"),
        (
            r'circular reference in token "([^"]*)" definition',
            r'the terminal "\1" refers to itself, which only rules may; write its name in lower case to make it a rule',
        ),
    )
)


_PLACE = re.compile(r"\s*while processing json-schema:///(.*)")
"""A line that says where in the schema the error of the line before it is."""


def explained(message: str) -> str:
    """Return an error message of llguidance in Baton's words, with as many lines as say something."""
    lines: list[str] = []
    for line in message.strip().splitlines():
        if (place := _PLACE.fullmatch(line)) is not None and lines:
            lines[-1] += f" (at {place[1] or '#'})"
        elif line.strip() and line.strip() != _MARK:
            lines.append(_explained_line(line.rstrip()))
    return "\n".join(lines)


def _explained_line(line: str) -> str:
    for pattern, explanation in _EXPLANATIONS:
        if pattern.search(line):
            return pattern.sub(explanation, line)
    return line

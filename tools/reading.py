"""Reads what the checks of structure and prose ask of a source, with one parsing for all of them."""

import ast
import io
import tokenize
from dataclasses import dataclass
from functools import cache

HELP_ARGUMENTS = ("help", "description", "doc")
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


@dataclass(frozen=True, slots=True)
class Reading:
    """The contents of one source that the checks ask for. A text is a pair: its line number and the text itself."""

    docstrings: tuple[tuple[int, str], ...]
    helps: tuple[tuple[int, str], ...]
    """Strings that `HELP_ARGUMENTS` are called with."""
    comments: tuple[tuple[int, str], ...]
    code_lines: frozenset[int]
    """Lines without docstrings, comments and blank lines."""
    classes: tuple[tuple[str, int, int], ...]
    """Name, first and last line of the classes of the module itself."""
    imports: tuple[tuple[str, str | None], ...]
    """Modules, each with one of the names that are taken from it, or None for the module itself."""


@cache
def read(source: str) -> Reading:
    """Parse `source` once. Raises `SyntaxError`."""
    docstrings, helps, imports = list[tuple[int, str]](), list[tuple[int, str]](), list[tuple[str, str | None]]()
    documented: set[int] = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                docstrings.append((node.lineno, text))
                documented.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            case ast.keyword(arg=name, value=ast.Constant(value=str(text))) if name in HELP_ARGUMENTS:
                helps.append((node.value.lineno, text))
            case ast.Import():
                imports += ((alias.name, None) for alias in node.names)
            case ast.ImportFrom(module=str(module)):
                imports += ((module, alias.name) for alias in node.names)
    comments, lines = list[tuple[int, str]](), set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.append((token.start[0], token.string))
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    classes = ((n.name, n.lineno, n.end_lineno or n.lineno) for n in tree.body if isinstance(n, ast.ClassDef))
    return Reading(
        docstrings=tuple(docstrings),
        helps=tuple(helps),
        comments=tuple(comments),
        code_lines=frozenset(lines - documented),
        classes=tuple(classes),
        imports=tuple(imports),
    )

"""Writes the pages of `--help`: the everyday options, one group, a search, or everything.

A command of a hundred options would otherwise print five screens, and the first of them is not what a new user needs.
"""

import argparse
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

HELP_WIDTH = 110
ALL = "all"
VLLM = "vllm"
MAX_SHORT_HELP = 16
"""A command with at most this many options shows all of them at once."""


class NothingFoundError(Exception):
    """`--help=WORD` was given, and no group of options has this name and no option contains the word."""


class HelpFormatter(argparse.HelpFormatter):
    """argparse's formatter of help texts, but it breaks no line inside a name with hyphens."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=HELP_WIDTH)

    def _split_lines(self, text: str, width: int) -> list[str]:
        # A name such as `x-baton-ttft-ms` must stay in one piece, so that users can find and copy it.
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


@dataclass(frozen=True, slots=True)
class HelpPages:
    """The pages that `--help` can print for one command. `groups` has its options (argparse actions) by the title of
    their group, and `everyday` the main ones.

    `sources` is the paragraph about environment variables and the configuration file.
    """

    program: str
    usage: str
    description: str
    sources: str
    groups: Mapping[str, Sequence[argparse.Action]]
    everyday: Sequence[argparse.Action]
    vllm: Callable[[], Sequence[tuple[str, str]]] | None = None
    """Returns the flags of vLLM that Baton lacks, each with its effect here; None: there is not such a page."""

    def page(self, word: str) -> str:
        """Return the text that `--help=WORD` prints, or plain `--help` if `word` is empty. Raises `NothingFoundError`
        if nothing matches the word.
        """
        count = sum(len(_shown(actions)) for actions in self.groups.values())
        if word == ALL or (not word and (not self.everyday or count <= MAX_SHORT_HELP)):
            return self._text([self.description, self.sources], self.groups)
        if not word:
            return self._text([self.description], {"everyday options": self.everyday}) + "\n" + self._advice()
        if word == VLLM and self.vllm is not None:
            return "".join(f"  {flag}\n{_indented(text)}\n" for flag, text in self.vllm())
        if found := self._found(word):
            return self._text([], found)
        raise NothingFoundError(
            f"--help={word}: no group has this name and no option contains it (groups: {', '.join(self.groups)}, {ALL})"
        )

    def _advice(self) -> str:
        """Return the last paragraphs of plain `--help`: the names of the groups of options, and how to see more."""
        counted = ", ".join(f"{title} ({len(_shown(actions))})" for title, actions in self.groups.items())
        more = (
            f"{self.program} --help=GROUP shows a group, --help=WORD all options whose name or text contains the word,"
            f" --help={ALL} every option" + (f", --help={VLLM} flags of vLLM." if self.vllm is not None else ".")
        )
        return "\n".join([_filled(f"groups of options: {counted}"), "", _filled(f"{more} {self.sources}"), ""])

    def _found(self, word: str) -> dict[str, Sequence[argparse.Action]]:
        """Return the group of options with the name `word`, or else all options whose name or text contains it, by
        their group.
        """
        # Users type a flag with its dashes or as in a file, where names have underscores.
        wanted = word.lower().lstrip("-").replace("_", "-")
        if (named := self.groups.get(wanted)) is not None:
            return {wanted: named}
        matching = {
            title: [action for action in _shown(actions) if wanted in _words(action) or word.lower() in _words(action)]
            for title, actions in self.groups.items()
        }
        return {title: actions for title, actions in matching.items() if actions}

    def _text(self, paragraphs: Sequence[str], sections: Mapping[str, Sequence[argparse.Action]]) -> str:
        # Not the parser's own `format_help`, which always shows all options.
        formatter = HelpFormatter(self.program)
        for title, actions in sections.items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        head = "\n\n".join([f"usage: {self.usage}", *(_filled(paragraph) for paragraph in paragraphs)])
        return f"{head}\n\n{formatter.format_help()}"


def _shown(actions: Sequence[argparse.Action]) -> list[argparse.Action]:
    """Return those of `actions` (options) that help pages show. A flag that only sets an option back to its default is
    left out.
    """
    return [action for action in actions if action.help != argparse.SUPPRESS]


def _words(action: argparse.Action) -> str:
    """Return the text of an option, in lower case, in which `--help=WORD` searches: its names and its help."""
    return " ".join([*action.option_strings, action.dest, str(action.help)]).lower()


def _indented(text: str) -> str:
    return textwrap.fill(text, HELP_WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False)


def _filled(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), HELP_WIDTH, break_on_hyphens=False)

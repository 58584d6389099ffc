"""Parses flags with argparse: abbreviations, underscores, and the suggestion after a mistyped flag."""

import argparse
import difflib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from baton_serve.services.common.settings.argv_words import prepared
from baton_serve.services.common.settings.help_pages import HelpFormatter, HelpPages, NothingFoundError
from baton_serve.services.common.settings.options import Option, Value
from baton_serve.services.common.settings.vllm_flags import VllmFlag, option_value, vllm_flag_advice, vllm_flags

_SOURCES = (
    "Each option can also be set by an environment variable ({flag}: {variable}; items of a list separated by commas)"
    " or by a key in --config FILE. A flag overrides the variable, which overrides the file."
)


class OptionError(Exception):
    """An error in a command line, such as an unknown flag or a flag without its value. The text is for the user."""


@dataclass(frozen=True, slots=True)
class Given:
    """The options that a command line contains, before their values are checked."""

    values: dict[str, object]
    """The values by option name, not converted yet."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the log about flags of vLLM that change nothing."""


class CommandLine:
    """The flags that one command accepts. `parse` reads a list of words; it may be called several times."""

    def __init__(
        self,
        options: list[Option],
        *,
        program: str,
        description: str,
        prefix: str,
        version: str,
        everyday: Sequence[str] = (),
        accepts_vllm: bool = False,
    ) -> None:
        """Prepare the flags for `options`. `prefix` is the start of the process's environment variables, for the help
        text. `everyday` has the names of the options that `--help` shows first; without it `--help` shows all.

        With `accepts_vllm`, flags of vLLM that ask for what Baton does in any case are accepted.
        """
        self._options = options
        self._program = program
        usage = " ".join(
            [
                program,
                *(o.name.upper() if o.is_required else f"[{o.name.upper()}]" for o in options if o.is_positional),
                "[options]",
            ]
        )
        self._parser = _Parser(
            prog=program,
            # Documents of vLLM and Intel abbreviate flags, such as `--gpu-memory-util`.
            allow_abbrev=True,
            # `--help` is added below, because it prints the pages of `HelpPages`.
            add_help=False,
            formatter_class=HelpFormatter,
            # A flag that is not given leaves no trace in the result: variables and the file may still set it.
            argument_default=argparse.SUPPRESS,
            usage=usage,
        )
        groups: dict[str, list[argparse.Action]] = {}
        by_name: dict[str, argparse.Action] = {}
        for option in options:
            by_name[option.name] = _add(self._parser, option)
            groups.setdefault(option.group or "options", []).append(by_name[option.name])
        self.pages = HelpPages(
            program=program,
            usage=usage,
            description=description,
            sources=_sources(options, prefix),
            groups=groups,
            everyday=[by_name[name] for name in everyday],
            vllm=self._vllm_page if accepts_vllm else None,
        )
        """The texts that `--help` prints."""
        groups["general"] = self._add_general(version)
        if accepts_vllm:
            _add_vllm_flags(self._parser, by_name)

    def _add_general(self, version: str) -> list[argparse.Action]:
        """Add the flags that every command has (`--config`, `--version`, `--help`), and return them as argparse
        actions.
        """
        add = self._parser.add_argument
        return [
            add("--config", metavar="FILE", help="YAML file with options; it may have a section for each command"),
            add("--version", action="version", version=f"baton {version}", help="show the version"),
            add(
                "-h",
                "--help",
                action=_PrintHelp,
                pages=self.pages,
                help="show the everyday options; =all every option, =GROUP one group, =WORD options that contain it",
            ),
        ]

    def parse(self, argv: Sequence[str]) -> Given:
        """Return the options that the words `argv` contain. Raises `OptionError` for an unknown flag, or one without
        its value.
        """
        try:
            words = prepared(argv)
        except ValueError as exc:
            raise OptionError(str(exc)) from exc
        found, unknown = self._parser.parse_known_args(words)
        if unknown:
            raise OptionError(self._name_unknown(unknown[0]))
        values = vars(found)
        taken: list[_Taken] = values.pop(_TAKEN, [])
        given = Given({name: value for name, value in values.items() if value is not None and value != []})
        for each in taken:
            each.add_to(given)
        return given

    def _vllm_page(self) -> list[tuple[str, str]]:
        """Return the flags of vLLM that are not names of Baton's options, as pairs (names, what Baton does with the
        flag).
        """
        actions = self._parser._actions
        flags = [action.flag for action in actions if isinstance(action, _TakeVllmFlag)]
        return sorted((", ".join(flag.names), flag.outcome) for flag in flags)

    def knows(self, flag: str) -> bool:
        """Return whether this command knows `flag`, a whole name such as `--max-model-len`: it accepts the flag, or
        refuses it with advice.
        """
        return flag in self._parser._option_string_actions

    def _name_unknown(self, word: str) -> str:
        """Return the error text for `word`, which is neither a known flag nor a value, with the best
        hint for the user.
        """
        flag = word.split("=", 1)[0]
        if not flag.startswith("-"):
            named = next((option for option in self._options if option.is_required and not option.is_positional), None)
            hint = f"did you mean {named.flag} {word}?" if named is not None else f"see {self._program} --help"
            return f"unexpected {word!r} ({hint})"
        if (instead := vllm_flag_advice(flag)) is not None:
            return f"vLLM's {flag} is not a flag of Baton: {instead}"
        # argparse has no public list of its flags.
        known = [flag for action in self._parser._actions for flag in action.option_strings]
        near = difflib.get_close_matches(flag, known, n=1, cutoff=0.7)
        return f"unknown flag {flag} (" + (f"did you mean {near[0]}?" if near else f"see {self._program} --help") + ")"


class _Parser(argparse.ArgumentParser):
    """argparse's parser, but it reports an error as `OptionError` instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(message.removeprefix("argument "))

    def _get_option_tuples(self, option_string: str) -> list[tuple[argparse.Action, str, str | None]]:
        # Several spellings of one flag do not make an abbreviation ambiguous.
        found = super()._get_option_tuples(option_string)
        return list({id(match[0]): match for match in found}.values())


_TAKEN = " flags of vLLM"
"""Name in argparse's result. The blank keeps it apart from the names of options."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """A flag of vLLM that was accepted: the flag, the name under which it was given, and its values."""

    flag: VllmFlag
    name: str
    values: tuple[str, ...]

    def add_to(self, given: Given) -> None:
        """Set in `given` the option of Baton that this flag of vLLM stands for, or add a note that it changes nothing.
        Raises `OptionError` if its value should be JSON and is not.
        """
        try:
            value = option_value(self.flag, *self.values) if self.flag.option else None
        except ValueError as exc:
            raise OptionError(f"{self.name}: {' '.join(self.values)!r} is neither a number nor a JSON object") from exc
        if value is not None and self.flag.option not in given.values:
            given.values[self.flag.option] = value
        else:
            reason = "Baton always works in this way" if self.flag.harmless else self.flag.text
            given.notes.append(f"{' '.join((self.name, *self.values))} changes nothing: {reason}")


class _TakeVllmFlag(argparse.Action):
    """An argparse action that accepts a flag of vLLM, or raises `OptionError` with advice if Baton refuses it."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, *, flag: VllmFlag, default: str = argparse.SUPPRESS
    ) -> None:
        arity = {"switch": 0, "value": None, "list": "+", "any": "*"}[flag.arity]
        # argparse takes the rest of the command line for a refused flag, which is then not parsed any more.
        super().__init__(option_strings, dest, nargs=arity, default=default, help=argparse.SUPPRESS)
        self.flag = flag

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        name = option_string or self.flag.names[0]
        given = tuple(map(str, values)) if isinstance(values, list) else (str(values),)
        if not self.flag.accepts(given) or name.startswith("--no-"):
            shown = " ".join([name, *(given if self.flag.harmless else ())])
            raise OptionError(f"vLLM's {shown} is not a flag of Baton: {vllm_flag_advice(name)}")
        taken = getattr(namespace, _TAKEN, [])
        setattr(namespace, _TAKEN, [*taken, _Taken(self.flag, name, given)])


def _add_vllm_flags(parser: argparse.ArgumentParser, options: Mapping[str, argparse.Action]) -> None:
    """Add to `parser` the flags of vLLM that are not names of Baton's options. A flag that sets an option of Baton is
    added only if that option is in `options`.
    """
    known = parser._option_string_actions
    for flag in vllm_flags():
        names = [name for name in flag.names if name not in known]
        if flag.arity == "switch":
            names += ["--no-" + name.removeprefix("--") for name in names]
        if names and (not flag.option or flag.option in options):
            parser.add_argument(*names, action=_TakeVllmFlag, dest=_TAKEN, flag=flag)


class _PrintHelp(argparse.Action):
    """An argparse action that prints a page of `--help` as soon as the flag is found, and exits."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, *, pages: HelpPages, help: str, default: str = argparse.SUPPRESS
    ) -> None:
        super().__init__(option_strings, dest, nargs="?", const="", metavar="WORD", default=default, help=help)
        self._pages = pages

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> NoReturn:
        try:
            sys.stdout.write(self._pages.page(str(values)))
        except NothingFoundError as exc:
            raise OptionError(str(exc)) from exc
        sys.exit(0)


def _sources(options: list[Option], prefix: str) -> str:
    """Return the paragraph of the help about environment variables, whose names begin with `prefix`, and the
    configuration file. One of `options` is its example.
    """
    # A name with an underscore shows best how a flag becomes a variable.
    example = next((option for option in options if "_" in option.name and option.kind is not bool), options[0])
    return _SOURCES.format(flag=example.flag, variable=prefix + example.name.upper())


def _add(parser: argparse.ArgumentParser, option: Option) -> argparse.Action:
    """Add the flags of `option` to `parser`, and return the argparse action of the flag that help pages show."""
    text = _help(option).replace("%", "%%")  # argparse formats help texts with the % operator.
    if option.is_positional:
        shown = parser.add_argument(option.name, metavar=option.name.upper(), nargs="?", help=text)
        # Also accept it as a flag, because `to_argv` writes flags alone.
        parser.add_argument(option.flag, dest=option.name, metavar="…", help=argparse.SUPPRESS)
        return shown
    names = [*option.aliases, option.flag]
    if option.kind is bool:
        off = "--no-" + option.flag.removeprefix("--")
        # The help shows only the flag that changes the default.
        main, other = (off, option.flag) if option.default is True else (option.flag, off)
        parser.add_argument(
            other, dest=option.name, action="store_const", const=other == option.flag, help=argparse.SUPPRESS
        )
        return parser.add_argument(main, dest=option.name, action="store_const", const=main == option.flag, help=text)
    if option.is_list:
        return parser.add_argument(
            *names, dest=option.name, nargs="+", action="extend", metavar=_metavar(option), help=text
        )
    if "off" in option.choices:
        # YAML reads `off` in a configuration file as false, for which `to_argv` writes this flag.
        off = "--no-" + option.flag.removeprefix("--")
        parser.add_argument(off, dest=option.name, action="store_const", const="off", help=argparse.SUPPRESS)
    return parser.add_argument(*names, dest=option.name, metavar=_metavar(option), help=text)


def _metavar(option: Option) -> str:
    if option.choices:
        return "|".join(option.choices) if len(option.choices) < 6 else "CHOICE"
    if option.unit:
        return option.unit.upper()
    return {int: "N", float: "X", dict: "JSON"}.get(option.kind, "TEXT")


def _help(option: Option) -> str:
    text = option.description
    if option.kind is bool and option.default is True:
        text = f"do not {text}"
    if len(option.choices) >= 6:
        text += f" ({', '.join(option.choices)})"
    if option.is_required:
        return f"{text} (required)"
    if option.is_secret or option.kind is bool or option.default in (None, "", []):
        return text
    return f"{text} (default: {_shown(option.default)}{_short_unit(option)})"


def _short_unit(option: Option) -> str:
    if option.unit == "bytes" and isinstance(option.default, int) and option.default % 2**20 == 0:
        return f" ({option.default // 2**20} MiB)"
    return {"seconds": " s"}.get(option.unit, "")


def _shown(value: Value) -> str:
    if isinstance(value, list):
        return " ".join(str(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)

"""Decides which value of a setting wins: flag, environment variable, `--config` file, vLLM's variable, default.

A flag overrides a variable, a variable overrides the file, and the file overrides the default. This is the only code
that reads the environment. An unknown name or a value that is not allowed stops the process with one line and status 2.
"""

import difflib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar, cast

import msgspec
import yaml

from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.settings.argv_words import flag_words
from baton_serve.services.common.settings.command_line import CommandLine, Given, OptionError
from baton_serve.services.common.settings.options import Option, Value, options_of
from baton_serve.services.common.settings.vllm_variables import from_vllm
from baton_serve.services.common.version import VERSION

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=msgspec.Struct)

ROLES = (
    "serve", "router", "prefill", "decode", "unified", "encode", "chat", "complete", "run_batch", "doctor",
    "drain", "rotate",
)  # fmt: skip
"""The commands that have settings; each may have a section in the file."""
# With a double underscore. With one, Kubernetes' own variables for a Service named `baton-router`, such as
# BATON_ROUTER_PORT=tcp://…, would be read as settings.
VARIABLE = "BATON__"
"""Start of the name of every variable."""


@dataclass(frozen=True, slots=True)
class Loaded(Generic[S]):
    """The result of `load_with`: the settings of this process, and the values that were given for options of other
    processes.
    """

    settings: S
    others: Mapping[str, Value]
    """Values that were given for options of other processes, by name."""
    sections: Mapping[str, Mapping[str, object]]
    """The sections of other roles in the file, not checked yet."""
    notes: Sequence[str] = ()
    """Sentences for the log about flags and variables of vLLM, for `log_notes`."""


def log_notes(notes: Sequence[str], level: str = "info") -> None:
    """Log `notes`, sentences about flags and variables of vLLM, unless the log level `level` is above info. Call
    `configure_logs` before.
    """
    logger.setLevel(level.upper())
    for note in notes:
        logger.info(note)


def load(
    cls: type[S], argv: Sequence[str], environ: Mapping[str, str], *, prefix: str, program: str, description: str
) -> S:
    """Return the settings `cls` of a process, filled from its arguments `argv`, the variables `environ`, a file and
    defaults.

    `prefix` is the start of its variables, such as `BATON__ROUTER__`. The names in `cls.EVERYDAY`, if it has that, are
    the options that --help shows first. Exits with status 0 after --help or --version, and with status 2 and one line
    on stderr if anything is wrong.
    """
    return load_with(cls, (), argv, environ, prefix=prefix, program=program, description=description).settings


def load_settings(cls: type[S], argv: Sequence[str], *, prefix: str, program: str, description: str) -> S:
    """Return the settings `cls` of this process, from `argv` and its own environment variables; see `load`."""
    return load(cls, argv, os.environ, prefix=prefix, program=program, description=description)


def environment() -> dict[str, str]:
    """Return a copy of this process's environment, to be passed to child processes and to `load_with`."""
    return dict(os.environ)


def load_with(
    cls: type[S],
    others: Sequence[Option],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    prefix: str,
    program: str,
    description: str,
) -> Loaded[S]:
    """Do the same as `load`, but also accept the options `others`, which belong to processes that this one starts. If
    an option of `cls` and one of `others` share a name, the option of `cls` counts.
    """
    own = options_of(cls)
    reader = _Reader(
        merged(own, others),
        prefix,
        program,
        everyday=getattr(cls, "EVERYDAY", ()),
        # Servers alone: a client's VLLM_API_KEY, or `--revision` for a doctor, have other meanings.
        accepts_vllm=getattr(cls, "ACCEPTS_VLLM", False),
    )
    try:
        read = reader.read(argv, environ, description)
        given = read.values
        missing = [option for option in own if option.is_required and option.name not in given]
        if missing:
            name = missing[0].name.upper() if missing[0].is_positional else missing[0].flag
            raise ConfigurationError(f"{name} is required ({missing[0].description})")
        settings = _make(cls, {option.name: given[option.name] for option in own if option.name in given})
    except (ConfigurationError, OptionError) as exc:
        stop(program, str(exc))
    mine = {option.name for option in own}
    others_given = {name: value for name, value in given.items() if name not in mine}
    return Loaded(settings, others_given, read.sections, read.notes)


def merged(own: Sequence[Option], others: Sequence[Option]) -> list[Option]:
    """Return the options of a command line that accepts both `own` and `others`. Of several options with the same name
    the first counts.
    """
    by_name: dict[str, Option] = {}
    for option in (*own, *others):
        by_name.setdefault(option.name, option)
    return list(by_name.values())


def stop(program: str, reason: str) -> NoReturn:
    """Exit this process with status 2 after printing `PROGRAM: REASON` as one line on stderr."""
    sys.stderr.write(f"{program}: {' '.join(reason.split())}\n")
    raise SystemExit(2)


def to_argv(values: Mapping[str, object]) -> list[str]:
    """Return the command-line flags that pass option values, by option name, to another process of Baton. A value of
    None is left out.
    """
    argv: list[str] = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        match value:
            case None:
                continue
            case True:
                argv.append(flag)
            case False:
                argv.append("--no-" + flag.removeprefix("--"))
            # `--flag=item` and not `--flag item`: an item may start with a dash.
            case list():
                argv += [f"{flag}={item}" for item in value]
            case dict():
                argv.append(f"{flag}={msgspec.json.encode(value).decode()}")
            case _:
                argv.append(f"{flag}={value}")
    return argv


def _make(cls: type[S], values: Mapping[str, Value]) -> S:
    """Create the settings Struct `cls` from checked values by option name.

    Raises `ConfigurationError` if its `__post_init__` refuses a combination of values with `ValueError`.
    """
    try:
        return cls(**values)
    except ValueError as exc:
        raise ConfigurationError(str(exc)) from exc


@dataclass(frozen=True, slots=True)
class _Read:
    """The result of reading all sources of settings: the checked values by option name, the file's sections for other
    roles, and notes for the log.
    """

    values: dict[str, Value]
    sections: Mapping[str, Mapping[str, object]]
    notes: list[str]


@dataclass(frozen=True, slots=True)
class _InFile:
    """The content of the configuration file: the values for this role, the sections for other roles, and keys that are
    flags of vLLM.
    """

    values: dict[str, object]
    sections: dict[str, Mapping[str, object]]
    flags: Given


class _Reader:
    """Collects the option values of one process from its command line, environment variables and configuration file."""

    def __init__(
        self,
        options: list[Option],
        prefix: str,
        program: str,
        everyday: Sequence[str] = (),
        accepts_vllm: bool = False,
    ) -> None:
        self._everyday = everyday
        self._accepts_vllm = accepts_vllm
        self._options = {option.name: option for option in options}
        self._prefix = prefix
        self._role = prefix.removeprefix(VARIABLE).strip("_").lower()
        self._program = program

    def read(self, argv: Sequence[str], environ: Mapping[str, str], description: str) -> _Read:
        """Return the checked option values of the command line, the environment and the file of `--config`. If several
        of them set an option, the first in this order counts.

        Raises `OptionError` for the command line and `ConfigurationError` for the other sources.
        """
        line = CommandLine(
            list(self._options.values()),
            program=self._program,
            description=description,
            prefix=self._prefix,
            version=VERSION,
            everyday=self._everyday,
            accepts_vllm=self._accepts_vllm,
        )
        flags = line.parse(argv)
        variables = self._variables(environ)
        path = flags.values.pop("config", None) or variables.pop("config", None)
        in_file = self._file(str(path), line) if path else _InFile({}, {}, Given({}))
        given: dict[str, Value] = {}
        for name, option in self._options.items():
            # The first source that has the name wins. `where` names the source in an error.
            for source, where in (
                (flags.values, name if option.is_positional else option.flag),
                (variables, self._prefix + name.upper()),
                (in_file.values | in_file.flags.values, f"{path}: {name}"),
            ):
                if name in source:
                    given[name] = option.convert(source[name], where)
                    break
        notes = [*flags.notes, *in_file.flags.notes]
        # Last: a variable that was set for vLLM must not override what was written for Baton.
        if self._accepts_vllm:
            from_environment = from_vllm(environ, self._options, given)
            for name, (variable, text) in from_environment.values.items():
                given[name] = self._options[name].convert(text, variable)
            notes += from_environment.notes
        return _Read(given, in_file.sections, notes)

    def _variables(self, environ: Mapping[str, str]) -> dict[str, object]:
        """Return the option values that are set by environment variables of this role, such as `BATON__ROUTER__PORT`.
        An empty variable counts as not set.

        Raises `ConfigurationError` for an unknown variable, also for one of an unknown role.
        """
        found: dict[str, object] = {}
        for variable, value in environ.items():
            if not variable.startswith(VARIABLE):
                continue
            role, _, name = variable.removeprefix(VARIABLE).lower().partition("__")
            if role not in ROLES:
                known = ", ".join(f"{VARIABLE}{role.upper()}__…" for role in ROLES)
                raise ConfigurationError(f"unknown variable {variable} (known: {known})")
            if role != self._role:
                continue
            if name not in self._options and name != "config":
                hint = nearest(variable, [self._prefix + known.upper() for known in self._options])
                raise ConfigurationError(f"unknown variable {variable}{self._or_help(hint)}")
            # Compose files and Kubernetes manifests often set a variable that is meant to be absent to "".
            if value:
                found[name] = value
        return found

    def _file(self, path: str, line: CommandLine) -> _InFile:
        """Return the content of the YAML file of `--config`. `line` parses keys that are flags of vLLM. Raises
        `ConfigurationError` if the file is not valid, or `OptionError` for a flag of vLLM that is refused.
        """
        try:
            with open(path, encoding="utf-8") as file:
                content = yaml.safe_load(file)
        except OSError as exc:
            raise ConfigurationError(f"--config {path}: {exc.strerror}") from exc
        except (yaml.YAMLError, UnicodeDecodeError) as exc:
            raise ConfigurationError(f"--config {path} is not YAML: {exc}") from exc
        values: dict[str, object] = {}
        sections: dict[str, Mapping[str, object]] = {}
        for key, value in _mapping(content, path).items():
            name = key.replace("-", "_")
            # `prefill` and `decode` are both roles and options of `serve`: a mapping is a section, a number an option.
            if name in ROLES and (isinstance(value, dict) or name not in self._options):
                sections[name] = {
                    inner.replace("-", "_"): item for inner, item in _mapping(value, f"{path}: {key}").items()
                }
            else:
                values[name] = value
        values |= sections.pop(self._role, {})
        others = [name for name in values if name not in self._options]
        for name in others:
            if not line.knows("--" + name.replace("_", "-").partition(".")[0]):
                raise ConfigurationError(
                    f"{path}: unknown key {name}{self._or_help(nearest(name, list(self._options)))}"
                )
        # vLLM's files have the names of its flags as keys. Some of them are other names of an option here.
        words = [word for name in others for word in flag_words(name, values.pop(name))]
        return _InFile(values, sections, line.parse(words))

    def _or_help(self, hint: str) -> str:
        return hint or f" (known: see {self._program} --help)"


def _mapping(content: object, where: str) -> dict[str, object]:
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigurationError(f"{where} must consist of `name: value` lines")
    return cast(dict[str, object], content)


def nearest(name: str, known: list[str]) -> str:
    """Return the text ` (did you mean …?)` with the known name that is most similar to `name`, or "" if none is
    similar.
    """
    found = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {found[0]}?)" if found else ""

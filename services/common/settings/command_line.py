"""Turns options into flags with argparse: errors of one line, underscores accepted as dashes, and a readable --help."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import NoReturn

from baton_serve.services.common.settings.help_pages import HelpFormatter, HelpPages, NothingFoundError
from baton_serve.services.common.settings.options import Option, Value

_ADVICE_FOR_FLAGS = (
    ("leave it out; requests are logged only with --enable-log-requests", "--disable-log-requests"),
    (
        "leave it out; --otlp-traces-endpoint turns traces on, with all their details",
        "--collect-detailed-traces",
    ),
    (
        "leave it out; the engine always works this way or chooses by itself",
        "--enable-chunked-prefill --num-scheduler-steps --multi-step-stream-outputs --use-v2-block-manager"
        " --disable-async-output-proc --disable-frontend-multiprocessing --preemption-mode --num-lookahead-slots"
        " --scheduler-delay-factor",
    ),
    (
        "leave it out; graphs are captured for all lengths, or for none with --enforce-eager",
        "--max-seq-len-to-capture --max-context-len-to-capture",
    ),
    ("leave it out; the model's config.json decides about sliding windows", "--disable-sliding-window"),
    (
        "leave it out; tensor-parallel ranks are processes of one host, without Ray",
        "--distributed-executor-backend --worker-use-ray --engine-use-ray --ray-workers-use-nsight",
    ),
    (
        "leave it out; the tokenizers library reads tokenizer.json",
        "--tokenizer-mode --tokenizer-pool-size --tokenizer-pool-type --tokenizer-pool-extra-config",
    ),
    ("leave it out; llguidance is always used", "--guided-decoding-backend"),
    (
        "leave it out; instances find each other by themselves, and --kv-transport can force a transport",
        "--kv-transfer-config",
    ),
    ("use --log-level", "--uvicorn-log-level"),
    ("use --quantization (sym_int4, fp8, …)", "--load-in-low-bit"),
    ("use --tensor-parallel-size, the only way to split a model", "--pipeline-parallel-size -pp"),
    ("start more instances: --prefill, --decode, --unified", "--data-parallel-size -dp"),
    ("weights stay on the device; --quantization makes them smaller", "--cpu-offload-gb"),
    (
        "speculative decoding is not supported",
        "--speculative-model --num-speculative-tokens --speculative-config",
    ),
    ("leave it out; the model's own processor prepares images", "--mm-processor-kwargs"),
    (
        "prompt adapters are not supported; --enable-lora serves LoRA adapters",
        "--enable-prompt-adapter --prompt-adapters --max-prompt-adapters --max-prompt-adapter-token",
    ),
)
"""Advice for flags of vLLM that Baton does not have, because commands are often copied from vLLM."""
_BY_FLAG = {flag: text for text, flags in _ADVICE_FOR_FLAGS for flag in flags.split()}


def vllm_flag_advice(flag: str) -> str | None:
    """Return what to use instead of a flag that vLLM has and Baton does not, as text for the user; None for any other
    flag.
    """
    return _BY_FLAG.get(flag)


_SOURCES = (
    "Each option can also be set by an environment variable ({flag}: {variable}; items of a list separated by commas)"
    " or by a key in --config FILE. A flag overrides the variable, which overrides the file."
)


class OptionError(Exception):
    """A flag that does not exist, or a flag without its value."""


class CommandLine:
    """The flags of one process. `parse` may be called once or several times; it has no state."""

    def __init__(
        self,
        options: list[Option],
        *,
        program: str,
        description: str,
        prefix: str,
        version: str,
        everyday: Sequence[str] = (),
    ) -> None:
        """`everyday` has the names of the options that `--help` shows first; without it `--help` shows all."""
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
            # An abbreviation could become ambiguous, or mean another flag, in a later version.
            allow_abbrev=False,
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
        )
        """The texts that `--help` prints."""
        groups["general"] = self._add_general(version)

    def _add_general(self, version: str) -> list[argparse.Action]:
        """Add the flags that every command has, and return them."""
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

    def parse(self, argv: Sequence[str]) -> dict[str, object]:
        """Return the values that were given, by option name, not converted yet. Raises `OptionError`."""
        found, unknown = self._parser.parse_known_args([_dashed(word) for word in argv])
        if unknown:
            raise OptionError(self._name_unknown(unknown[0]))
        return {name: value for name, value in vars(found).items() if value is not None and value != []}

    def _name_unknown(self, word: str) -> str:
        """Return the error for a word that is neither a flag nor a value, with the best hint for it."""
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
    """Reports errors as `OptionError`; argparse itself would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(message.removeprefix("argument "))


class _PrintHelp(argparse.Action):
    """Prints a page of `--help` as soon as the flag is found, and exits."""

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
    """Return the help's paragraph about variables and the file, with an option of this process as example."""
    # A name with an underscore shows best how a flag becomes a variable.
    example = next((option for option in options if "_" in option.name and option.kind is not bool), options[0])
    return _SOURCES.format(flag=example.flag, variable=prefix + example.name.upper())


def _add(parser: argparse.ArgumentParser, option: Option) -> argparse.Action:
    """Add the flags of an option and return the one that help pages show."""
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


def _dashed(word: str) -> str:
    """Return `--max_model_len=4` as `--max-model-len=4`. The value keeps its underscores."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value

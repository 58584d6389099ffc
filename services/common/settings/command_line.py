"""Options as flags: argparse with one-line errors, underscores taken for dashes, and a --help that is worth reading."""

import argparse
import difflib
import textwrap
from collections.abc import Sequence
from typing import NoReturn

from baton_serve.services.common.settings.options import Option, Value

_ADVICE_FOR_FLAGS = (
    ("prompts are logged only with --enable-log-requests: leave it out", "--disable-log-requests"),
    (
        "numbers are at /metrics, traces with --otlp-traces-endpoint: leave it out",
        "--disable-log-stats --collect-detailed-traces",
    ),
    (
        "the engine does what is best there by itself: leave it out",
        "--enable-chunked-prefill --num-scheduler-steps --multi-step-stream-outputs --use-v2-block-manager"
        " --disable-async-output-proc --disable-frontend-multiprocessing --preemption-mode --num-lookahead-slots"
        " --scheduler-delay-factor",
    ),
    (
        "graphs are captured for every length: leave it out, or give --enforce-eager",
        "--max-seq-len-to-capture --max-context-len-to-capture",
    ),
    ("windows are as the model's config says: leave it out", "--disable-sliding-window"),
    (
        "ranks are processes of one host, without Ray: leave it out",
        "--distributed-executor-backend --worker-use-ray --engine-use-ray --ray-workers-use-nsight",
    ),
    (
        "tokenizer.json is read by the tokenizers library: leave it out",
        "--tokenizer-mode --tokenizer-pool-size --tokenizer-pool-type --tokenizer-pool-extra-config",
    ),
    ("llguidance does it: leave it out", "--guided-decoding-backend"),
    ("instances find each other by themselves; --kv-transport may force how blocks travel", "--kv-transfer-config"),
    ("give --log-level", "--uvicorn-log-level"),
    ("give --quantization (sym_int4, fp8, …)", "--load-in-low-bit"),
    (
        "the model is a folder on this machine: download that revision first",
        "--revision --code-revision --tokenizer-revision --download-dir",
    ),
    ("change the folder's config.json", "--hf-overrides --rope-scaling --rope-theta"),
    ("a model is split by --tensor-parallel-size alone", "--pipeline-parallel-size -pp"),
    ("give more instances: --prefill, --decode, --unified", "--data-parallel-size -dp"),
    ("weights stay on the device; --quantization makes them smaller", "--cpu-offload-gb"),
    ("there is no speculative decoding", "--speculative-model --num-speculative-tokens --speculative-config"),
    ("images are read as the model's own processor says: leave it out", "--mm-processor-kwargs"),
    (
        "there are no prompt adapters; --enable-lora serves low-rank ones",
        "--enable-prompt-adapter --prompt-adapters --max-prompt-adapters --max-prompt-adapter-token",
    ),
)
_BY_FLAG = {flag: text for text, flags in _ADVICE_FOR_FLAGS for flag in flags.split()}


def vllm_flag_advice(flag: str) -> str | None:
    """None: no flag of vLLM's that needs a word."""
    return _BY_FLAG.get(flag)


_HELP_WIDTH = 110
_SOURCES = (
    "Each option is also a variable ({flag} is {variable}; lists with commas) and a key of --config FILE."
    " A flag wins over a variable, a variable over the file, the file over the default."
)


class OptionError(Exception):
    """A flag that does not exist, or that lacks its value."""


class CommandLine:
    def __init__(self, options: list[Option], *, program: str, description: str, prefix: str, version: str) -> None:
        self._options = options
        self._program = program
        self._parser = _Parser(
            prog=program,
            description=f"{description} {_sources(options, prefix)}",
            allow_abbrev=False,
            add_help=False,
            formatter_class=_formatter,
            argument_default=argparse.SUPPRESS,
            usage=" ".join([program, *(f"[{o.name.upper()}]" for o in options if o.is_positional), "[options]"]),
        )
        groups: dict[str, argparse._ArgumentGroup] = {}
        for option in options:
            title = option.group or "options"
            if title not in groups:
                groups[title] = self._parser.add_argument_group(title)
            _add(groups[title], option)
        general = self._parser.add_argument_group("general")
        general.add_argument("--config", metavar="FILE", help="YAML file of options; a section per role is allowed")
        general.add_argument("--version", action="version", version=f"baton {version}", help="tell the version")
        general.add_argument("-h", "--help", action="help", help="show this")

    def parse(self, argv: Sequence[str]) -> dict[str, object]:
        """Values by option name, only those given; not converted. Raises `OptionError`."""
        found, unknown = self._parser.parse_known_args([_dashed(word) for word in argv])
        if unknown:
            raise OptionError(self._name_unknown(unknown[0]))
        return {name: value for name, value in vars(found).items() if value is not None and value != []}

    def _name_unknown(self, word: str) -> str:
        flag = word.split("=", 1)[0]
        if not flag.startswith("-"):
            named = next((option for option in self._options if option.is_required and not option.is_positional), None)
            hint = f"did you mean {named.flag} {word}?" if named is not None else f"see {self._program} --help"
            return f"unexpected {word!r} ({hint})"
        if (instead := vllm_flag_advice(flag)) is not None:
            return f"vLLM's {flag} is no flag here: {instead}"
        known = [flag for action in self._parser._actions for flag in action.option_strings]
        near = difflib.get_close_matches(flag, known, n=1, cutoff=0.7)
        return f"unknown flag {flag} (" + (f"did you mean {near[0]}?" if near else f"see {self._program} --help") + ")"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionError(message.removeprefix("argument "))


def _sources(options: list[Option], prefix: str) -> str:
    example = next((option for option in options if "_" in option.name and option.kind is not bool), options[0])
    return _SOURCES.format(flag=example.flag, variable=prefix + example.name.upper())


class _Formatter(argparse.HelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        """Not within `x-baton-ttft-ms`, which is to be found and copied."""
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def _formatter(prog: str) -> argparse.HelpFormatter:
    return _Formatter(prog, max_help_position=34, width=_HELP_WIDTH)


def _add(group: "argparse._ArgumentGroup", option: Option) -> None:
    text = _help(option).replace("%", "%%")
    if option.is_positional:
        group.add_argument(option.name, metavar=option.name.upper(), nargs="?", help=text)
        group.add_argument(option.flag, dest=option.name, metavar="…", help=argparse.SUPPRESS)
        return
    names = [*option.aliases, option.flag]
    if option.kind is bool:
        off = "--no-" + option.flag.removeprefix("--")
        shown, other = (off, option.flag) if option.default is True else (option.flag, off)
        group.add_argument(shown, dest=option.name, action="store_const", const=shown == option.flag, help=text)
        group.add_argument(
            other, dest=option.name, action="store_const", const=other == option.flag, help=argparse.SUPPRESS
        )
    elif option.is_list:
        group.add_argument(*names, dest=option.name, nargs="+", action="extend", metavar=_metavar(option), help=text)
    else:
        group.add_argument(*names, dest=option.name, metavar=_metavar(option), help=text)


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
    """`--max_model_len=4` as `--max-model-len=4`."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value

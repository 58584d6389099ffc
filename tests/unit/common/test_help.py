"""The pages of `--help`: everyday options first, groups, searches, and every flag once."""

import re
from collections import Counter
from collections.abc import Sequence

import pytest

from baton_serve.child_command import module_command
from baton_serve.services import cli
from baton_serve.services.common.settings.options import Option, options_of
from baton_serve.services.instance.settings import InstanceSettings
from baton_serve.services.local.plan import MANAGED_INSTANCE_OPTIONS, MANAGED_ROUTER_OPTIONS
from baton_serve.services.local.settings import ChatSettings, ServeSettings
from baton_serve.services.router.settings import RouterSettings

ROUTER, INSTANCE = options_of(RouterSettings), options_of(InstanceSettings)
OPTIONS: dict[str, list[Option]] = {
    "serve": [
        *options_of(ServeSettings),
        *(option for option in INSTANCE if option.name not in MANAGED_INSTANCE_OPTIONS),
        *(option for option in ROUTER if option.name not in MANAGED_ROUTER_OPTIONS),
    ],
    "router": ROUTER,
    "prefill": INSTANCE,
    "decode": INSTANCE,
    "unified": INSTANCE,
    "encode": INSTANCE,
    "chat": options_of(ChatSettings),
}
GENERAL = {"--config", "--version", "--help"}
SERVE_FLAGS = [
    "MODEL",
    "--prefill",
    "--decode",
    "--port",
    "--host",
    "--served-model-name",
    "--max-model-len",
    "--quantization",
    "--gpu-memory-utilization",
    "--api-key",
]


def flags_of(names: Sequence[str]) -> list[str]:
    """Return the flags of options. The first one is the model, which needs no flag."""
    assert names[0] == "model"
    return ["MODEL", *("--" + name.replace("_", "-") for name in names[1:])]


def page(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    printed = capsys.readouterr()
    assert stopped.value.code == 0 and printed.err == ""
    return printed.out


def listed(text: str) -> list[str]:
    """Return what each entry of a page begins with: its last and main flag, or the name of a positional."""
    entries = re.findall(r"^  (?! )(\S.*)$", text, re.MULTILINE)
    heads = [re.split(r" {2,}", entry)[0] for entry in entries]
    return [re.findall(r"--[a-z0-9-]+|^[A-Z]+", head)[-1] for head in heads]


def sections(text: str) -> list[str]:
    return re.findall(r"^([a-z][a-z ]*):$", text, re.MULTILINE)


def shown(option: Option) -> str:
    if option.is_positional:
        return option.name.upper()
    return option.flag.replace("--", "--no-", 1) if option.default is True else option.flag


@pytest.mark.parametrize("command", OPTIONS)
def test_everything_shows_each_option_once(capsys: pytest.CaptureFixture[str], command: str) -> None:
    text = page(capsys, command, "--help=all")
    assert Counter(listed(text)) == Counter({shown(option) for option in OPTIONS[command]} | GENERAL)
    assert len(sections(text)) == len(set(sections(text))), "a group is one section"


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("serve", SERVE_FLAGS),
        ("router", flags_of(RouterSettings.EVERYDAY)),
        ("prefill", flags_of(InstanceSettings.EVERYDAY)),
        ("decode", flags_of(InstanceSettings.EVERYDAY)),
    ],
)
def test_a_command_of_many_options_shows_ten_of_them_and_the_names_of_its_groups(
    capsys: pytest.CaptureFixture[str], command: str, flags: list[str]
) -> None:
    text = page(capsys, command, "--help")
    assert listed(text) == flags and len(flags) == 10
    assert sections(text) == ["everyday options"]
    named = re.search(r"^groups of options: (.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    assert named is not None
    counts = {name: int(count) for name, count in re.findall(r"(\w+)\s+\((\d+)\)", named[1])}
    assert list(counts) == sections(page(capsys, command, "--help=all"))
    assert sum(counts.values()) == len({shown(option) for option in OPTIONS[command]} | GENERAL)
    assert all(part in text for part in (f"baton {command} --help=GROUP", "--help=WORD", "--help=all"))


def test_a_command_of_few_options_shows_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert page(capsys, "chat", "--help") == page(capsys, "chat", "--help=all")


def test_help_of_baton_names_the_commands_and_the_everyday_options_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, "--help")
    for command in cli.COMMANDS:
        assert re.search(rf"^  {command} +\w", text, re.MULTILINE)
    assert text.endswith(page(capsys, "serve", "--help")) and page(capsys) == text
    assert page(capsys, "--help=lora") == page(capsys, "serve", "--help=lora")


def test_the_name_of_a_group_shows_that_group(capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, "serve", "--help=LoRA")
    assert sections(text) == ["lora"]
    assert listed(text) == [
        "--enable-lora", "--lora-modules", "--lora-dtype", "--max-loras", "--max-lora-rank", "--max-cpu-loras",
    ]  # fmt: skip


@pytest.mark.parametrize("word", ["tool-call", "tool_call", "--tool-call"])
def test_another_word_shows_the_options_with_that_word_in_name_or_text(
    capsys: pytest.CaptureFixture[str], word: str
) -> None:
    text = page(capsys, "router", f"--help={word}")
    assert listed(text) == ["--enable-auto-tool-choice", "--tool-call-parser"]
    assert sections(text) == ["requests"]


def test_an_alias_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--host-kv-gb" in listed(page(capsys, "serve", "--help=swap-space"))


def test_a_word_that_is_nowhere_is_an_error_that_names_the_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["decode", "--help=xyzzy"])
    printed = capsys.readouterr()
    assert stopped.value.code == 2 and printed.out == ""
    assert printed.err.startswith("baton decode: --help=xyzzy: no group") and "handoff, " in printed.err
    assert printed.err.count("\n") == 1


def test_the_page_about_vllm_says_what_becomes_of_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, "serve", "--help=vllm")
    assert re.search(r"--disable-log-requests\n      changes nothing: requests are logged only with", text)
    assert re.search(r"--speculative-config\n      refused: speculative decoding", text)
    assert re.search(r"--max-num-partial-prefills\n      accepted as 1, else refused: the scheduler", text)
    assert "  --data-parallel-size, " not in text, "it is an option of baton serve"


def test_bench_replaces_the_process_by_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def replace(program: str, words: list[str]) -> None:
        started.append(words)
        raise SystemExit(0)

    monkeypatch.setattr("os.execv", replace)
    with pytest.raises(SystemExit):
        cli.main(["bench", "serve", "--port", "8005"])
    assert started == [module_command("baton_serve.bench.cli", "serve", "--port", "8005")]

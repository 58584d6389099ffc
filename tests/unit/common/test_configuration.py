"""Settings: precedence, checks, and one line for every mistake."""

import json
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from baton_serve.services.common.settings.configuration import load, load_with, to_argv
from baton_serve.services.common.settings.options import options_of

Port = Annotated[int, Meta(ge=0, le=65535)]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[str, Meta(description="folder of a model", min_length=1, extra={"group": "engine"})]
    device: Annotated[Literal["auto", "cpu"], Meta(description="where it runs")] = "auto"
    max_model_len: Annotated[int | None, Meta(description="greatest context", ge=1)] = None
    gpu_memory_utilization: Annotated[float, Meta(description="fraction of memory", gt=0, le=1)] = 0.9
    enable_prefix_caching: Annotated[bool, Meta(description="keep blocks")] = True
    enforce_eager: Annotated[bool, Meta(description="never capture graphs")] = False
    api_key: Annotated[list[str], Meta(description="accepted keys", extra={"secret": True, "group": "server"})] = []
    port: Annotated[Port, Meta(description="port to listen on")] = 8000
    drain_timeout_s: Annotated[float, Meta(description="time to end", ge=0)] = 30.0
    max_request_bytes: Annotated[int, Meta(description="greatest body", ge=1)] = 8 * 2**20
    overrides: Annotated[dict[str, object], Meta(description="of the model's config")] = {}


class Other(msgspec.Struct, frozen=True, kw_only=True):
    port: int = 1
    max_replays: Annotated[int, Meta(ge=0)] = 3


def read(*argv: str, **environ: str) -> Settings:
    variables = {f"BATON__ROUTER__{name}": value for name, value in environ.items()}
    return load(
        Settings,
        ["--model", "m", *argv],
        {"PATH": "/bin", "BATON_ROUTER_PORT": "tcp://10.0.0.1:8000", **variables},
        prefix="BATON__ROUTER__",
        program="baton router",
        description="A router.",
    )


def refusal(capsys: pytest.CaptureFixture[str], *argv: str, **environ: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        read(*argv, **environ)
    assert stopped.value.code == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    return said.err


def test_without_anything_the_defaults_hold() -> None:
    assert read() == Settings(model="m")


def test_a_flag_wins_over_a_variable_a_variable_over_the_file_the_file_over_the_default(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("port: 1\nmax-model-len: 10\ndrain_timeout_s: 5\n")
    found = read("--config", str(file), "--port", "3", PORT="2", MAX_MODEL_LEN="20")
    assert (found.port, found.max_model_len, found.drain_timeout_s, found.device) == (3, 20, 5.0, "auto")


def test_a_section_of_the_file_wins_over_its_top_and_other_sections_are_for_others(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("port: 1\nrouter:\n  port: 2\nprefill: {max-num-seqs: 4}\ndecode:\n")
    assert read(CONFIG=str(file)).port == 2
    loaded = load_with(
        Settings,
        [],
        ["--model=m", f"--config={file}"],
        {},
        prefix="BATON__SERVE__",
        program="baton serve",
        description="",
    )
    assert loaded.settings.port == 1
    assert loaded.sections == {"router": {"port": 2}, "prefill": {"max_num_seqs": 4}, "decode": {}}


def test_values_are_read_as_vllm_reads_them() -> None:
    found = read("--max_model_len", "16k", "--max-request-bytes=2GiB", "--no-enable-prefix-caching", "--enforce-eager")
    assert (found.max_model_len, found.max_request_bytes) == (16_000, 2 * 2**30)
    assert not found.enable_prefix_caching and found.enforce_eager
    assert read("--max-model-len", "2K").max_model_len == 2048
    assert read("--api-key", "a", "b", "--api-key=-c").api_key == ["a", "b", "-c"]
    assert read("--overrides", '{"a": 1}').overrides == {"a": 1}


def test_variables_carry_lists_booleans_and_nothing() -> None:
    found = read(API_KEY="a, b", ENFORCE_EAGER="true", ENABLE_PREFIX_CACHING="0", MAX_MODEL_LEN="", DEVICE="cpu")
    assert found.api_key == ["a", "b"] and found.enforce_eager and not found.enable_prefix_caching
    assert found.max_model_len is None and found.device == "cpu"
    assert read(MAX_MODEL_LEN="none").max_model_len is None


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        pytest.param(["--prot", "1"], ["--prot", "--port"], id="unknown flag"),
        pytest.param(["--disable_log_requests"], ["--disable-log-requests", "leave it out"], id="vLLM's flag"),
        pytest.param(["-dpl=2"], ["-dpl", "--prefill"], id="vLLM's short flag"),
        pytest.param(["--qwertz"], ["--qwertz", "--help"], id="unlike any flag"),
        pytest.param(["--max"], ["--max", "--max-model-len", "--max-request-bytes"], id="ambiguous abbreviation"),
        pytest.param(["--port"], ["--port", "expected one argument"], id="value missing"),
        pytest.param(["--port", "70000"], ["--port", "'70000'", "an integer >= 0 and <= 65535"], id="out of range"),
        pytest.param(["--port", "80.5"], ["--port", "an integer"], id="wrong type"),
        pytest.param(["--gpu-memory-utilization", "0"], ["number > 0 and <= 1"], id="exclusive bound"),
        pytest.param(["--gpu-memory-utilization", "nan"], ["'nan'"], id="not a number"),
        pytest.param(["--device", "tpu"], ["--device", "'tpu'", "one of auto, cpu"], id="not a choice"),
        pytest.param(["--model", ""], ["--model", "not empty"], id="empty"),
        pytest.param(["stray"], ["'stray'", "did you mean --model stray?"], id="stray word"),
        pytest.param(["--max-request-bytes", "1X"], ["'1X'", "512M"], id="unknown unit"),
        pytest.param(["--overrides", "[1]"], ["--overrides", "JSON object"], id="no JSON object"),
    ],
)
def test_a_bad_flag_is_named_in_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], named: list[str]) -> None:
    said = refusal(capsys, *argv)
    assert said.startswith("baton router: ")
    assert all(part in said for part in named), said


def test_a_bad_variable_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean BATON__ROUTER__PORT?" in refusal(capsys, PROT="1")
    said = refusal(capsys, PORT="x")
    assert "BATON__ROUTER__PORT" in said and "an integer" in said
    with pytest.raises(SystemExit):
        load(Settings, [], {"BATON__ROUTR__PORT": "1"}, prefix="BATON__ROUTER__", program="p", description="")
    assert "BATON__ROUTR__PORT" in capsys.readouterr().err


def test_a_variable_of_another_role_is_none_of_our_business() -> None:
    found = load(
        Settings, ["--model=m"], {"BATON__PREFILL__X": "1"}, prefix="BATON__ROUTER__", program="p", description=""
    )
    assert found == Settings(model="m")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("prot: 1", ["prot", "did you mean port?"]),
        ("port: x", ["port", "'x'", "an integer"]),
        ("port: true", ["port", "an integer"]),
        ("router: {prot: 1}", ["prot"]),
        ("- a", ["name: value"]),
        ("{", ["not YAML"]),
    ],
)
def test_a_bad_file_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, named: list[str]
) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text(content)
    said = refusal(capsys, "--config", str(file))
    assert str(file) in said and all(part in said for part in named), said


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "/no/such.yaml: No such file" in refusal(capsys, "--config", "/no/such.yaml")


def test_a_required_option_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(Settings, [], {}, prefix="BATON__ROUTER__", program="baton router", description="")
    assert capsys.readouterr().err == "baton router: --model is required (folder of a model)\n"


def test_a_secret_is_not_repeated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("api-key: [{hunter2: 1}]")
    assert "hunter2" not in refusal(capsys, "--config", str(file))


def test_help_shows_groups_defaults_and_units(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        read("--help")
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "engine: --model",
        "server: --api-key",
        "--drain-timeout-s SECONDS time to end (default: 30 s)",
        "--max-request-bytes BYTES greatest body (default: 8388608 (8 MiB))",
        "--no-enable-prefix-caching do not keep blocks",
        "--max-model-len: BATON__ROUTER__MAX_MODEL_LEN",
        "--device auto|cpu",
    ):
        assert part in text, text


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        read("--version")
    assert stopped.value.code == 0 and capsys.readouterr().out.startswith("baton ")


def test_options_of_other_processes_are_accepted_and_kept_apart() -> None:
    loaded = load_with(
        Settings,
        options_of(Other),
        ["--model=m", "--max-replays", "5", "--port", "4"],
        {},
        prefix="BATON__SERVE__",
        program="baton serve",
        description="",
    )
    assert loaded.settings.port == 4 and loaded.others == {"max_replays": 5}


def test_argv_made_of_values_reads_back_as_those_values() -> None:
    values = {
        "model": "m",
        "max_model_len": 7,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "api_key": ["-a", "b c"],
        "overrides": {"x": [1, None]},
        "drain_timeout_s": None,
    }
    found = load(Settings, to_argv(values), {}, prefix="BATON__ROUTER__", program="p", description="")
    expected = {name: value for name, value in values.items() if value is not None}
    assert {name: getattr(found, name) for name in expected} == expected
    assert json.loads(to_argv({"overrides": {"x": 1}})[0].partition("=")[2]) == {"x": 1}


class ModeSettings(msgspec.Struct, frozen=True, kw_only=True):
    kv_checksum: Annotated[Literal["full", "off"], Meta(description="which blocks are checked")] = "full"


def test_off_in_a_file_is_the_choice_off(tmp_path: Path) -> None:
    """YAML reads it as false, also where it is passed on to another process."""
    file = tmp_path / "baton.yaml"
    file.write_text("kv_checksum: off\n")
    for argv in (["--config", str(file)], to_argv({"kv_checksum": False}), ["--kv-checksum", "off"]):
        found = load(ModeSettings, argv, {}, prefix="BATON__ROUTER__", program="p", description="")
        assert found.kv_checksum == "off"


class SharedSettings(msgspec.Struct, frozen=True, kw_only=True):
    registry: Annotated[str, Meta(description="a registry", extra={"group": "process"})] = ""
    log_level: str = "info"


class DerivedSettings(SharedSettings, frozen=True, kw_only=True):
    workers: Annotated[int, Meta(description="processes", extra={"group": "server"})] = 1
    registry: Annotated[str, Meta(description="the registry of this router")] = "memory://127.0.0.1:1"


def test_help_shows_the_fields_of_a_derived_class_before_those_that_it_shares() -> None:
    assert [(o.name, o.group) for o in options_of(DerivedSettings)] == [
        ("workers", "server"),
        ("registry", "server"),
        ("log_level", "server"),
    ]


def test_a_field_that_is_declared_again_has_the_text_and_default_of_the_derived_class() -> None:
    (registry,) = [option for option in options_of(DerivedSettings) if option.name == "registry"]
    assert (registry.description, registry.default) == ("the registry of this router", "memory://127.0.0.1:1")

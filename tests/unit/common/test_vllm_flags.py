"""Command lines and variables that were written for vLLM: accepted with their meaning, or refused with advice."""

import shlex
from pathlib import Path

import pytest

from baton_serve.services.common.settings.configuration import Loaded, load_with
from baton_serve.services.common.settings.options import options_of
from baton_serve.services.common.settings.vllm_flags import vllm_flags
from baton_serve.services.instance.settings import InstanceSettings
from baton_serve.services.local.plan import MANAGED_INSTANCE_OPTIONS, MANAGED_ROUTER_OPTIONS
from baton_serve.services.local.pools import with_pools
from baton_serve.services.local.settings import ServeSettings
from baton_serve.services.router.settings import RouterSettings

FILE = Path(__file__).parent / "vllm_command_lines.txt"
COMMAND_LINES = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
OTHERS = [
    *(option for option in options_of(InstanceSettings) if option.name not in MANAGED_INSTANCE_OPTIONS),
    *(option for option in options_of(RouterSettings) if option.name not in MANAGED_ROUTER_OPTIONS),
]
ADVICE = {flag.text for flag in vllm_flags()}


def serve(*argv: str, **environ: str) -> Loaded[ServeSettings]:
    return load_with(
        ServeSettings, OTHERS, argv, environ, prefix="BATON__SERVE__", program="baton serve", description=""
    )


def instance(*argv: str, **environ: str) -> Loaded[InstanceSettings]:
    return load_with(
        InstanceSettings, (), argv, environ, prefix="BATON__DECODE__", program="baton decode", description=""
    )


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        serve(*argv)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def words(line: str) -> list[str]:
    # Without quotes around JSON, as a shell would pass it.
    lexer = shlex.shlex(line, posix=False)
    lexer.whitespace_split, lexer.commenters, lexer.quotes = True, "", ""
    return list(lexer)


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_a_command_line_of_vllms_and_intels_documents_is_parsed_or_refused_with_advice(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert serve(*words(line)).settings.model == "m"
    except SystemExit:
        said = capsys.readouterr().err
        assert any(text in said for text in ADVICE), said


def test_the_canonical_command_of_intels_documents_means_what_it_means_in_vllm() -> None:
    found = serve(*words(COMMAND_LINES[1]))
    assert found.others == {
        "served_model_name": ["m"],
        "dtype": "float16",
        "enforce_eager": True,
        "trust_remote_code": True,
        "disable_sliding_window": True,
        "gpu_memory_utilization": 0.9,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 8192,
        "max_model_len": 8192,
        "block_size": 64,
        "quantization": "fp8",
        "tensor_parallel_size": 1,
    }
    assert found.notes == [
        "--disable-log-requests changes nothing: requests are logged only with --enable-log-requests"
    ]


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--gpu-memory-util", "0.5"], "gpu_memory_utilization", 0.5),
        (["--max-num-seq=4"], "max_num_seqs", 4),
        (["--kv-cache-mem", "4G"], "kv_cache_memory_bytes", 4 * 2**30),
        (["-q", "FP8"], "quantization", "fp8"),
        (["-q=gptq_marlin"], "quantization", "gptq"),
        (["--load-in-low-bit", "sym_int8"], "quantization", "int8"),
        (["--load-in-low-bit", "asym_int4", "-q", "awq"], "quantization", "awq"),
        (["--dtype", "half"], "dtype", "float16"),
        (["--dtype", "float"], "dtype", "float32"),
        (["-O0"], "enforce_eager", True),
        (["--compilation-config.cudagraph_mode", "NONE"], "enforce_eager", True),
        (["--models.small.model", "/models/small", "--models.small.max_model_len", "8"], "models", {"small": {
            "model": "/models/small", "max_model_len": 8}}),
        (["--models", '{"a": {}}', "--models.b.model=x"], "models", {"a": {}, "b": {"model": "x"}}),
    ],
)  # fmt: skip
def test_a_spelling_of_vllm_sets_the_option(argv: list[str], name: str, value: object) -> None:
    assert serve(*argv).others[name] == value


@pytest.mark.parametrize(
    "argv", [["-O3"], ["-O.level", "3"], ["--load-in-low-bit", "fp16"], ["--max-num-partial-prefills", "1"]]
)
def test_a_flag_that_asks_for_what_is_done_anyway_is_noted_and_sets_nothing(argv: list[str]) -> None:
    found = serve(*argv)
    assert found.others == {} and len(found.notes) == 1 and "changes nothing" in found.notes[0]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--max-num-partial-prefills", "2"], "vLLM's --max-num-partial-prefills 2 is not a flag of Baton: the sch"),
        (["--max-num-partial=2"], "the scheduler decides"),
        (["--speculative_model", "[ngram]"], "speculative decoding is not supported"),
        (["--no-enable-chunked-prefill"], "leave it out; prompts are always computed in chunks"),
        (["--max-model-le"], "expected one argument"),
        (["--max-num"], "ambiguous option: --max-num could match"),
        (["--compilation-config", "{"], "neither a number nor a JSON object"),
        (["--models.small.model"], "--models.small.model: expected one argument"),
        (["--quantisation", "fp8"], "did you mean --quantization?"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refusal(capsys, *argv)


def test_replicas_multiply_the_pools() -> None:
    settings = serve("m", "--dp", "2", "--unified", "3").settings
    found = with_pools(settings, "generate")
    assert (found.prefill, found.decode, found.unified, found.data_parallel_size) == (2, 2, 6, 1)
    assert with_pools(found, "generate") == found


def test_a_file_in_the_form_of_vllm_has_its_flags_as_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "model: m\nhost: 127.0.0.1\nport: 6398\nuvicorn-log-level: info\ndisable-log-requests: true\n"
        "swap-space: 4\ncompilation-config: {level: 3}\nserved-model-name: [a, b]\n"
    )
    found = serve("--config", str(file), "--port", "1")
    assert (found.settings.model, found.settings.port, found.others["host_kv_gb"]) == ("m", 1, 4.0)
    assert found.others["served_model_name"] == ["a", "b"]
    assert [note.partition(" ")[0] for note in found.notes] == [
        "--uvicorn-log-level", "--disable-log-requests", "--compilation-config",
    ]  # fmt: skip
    file.write_text("max-num-partial-prefills: 2\n")
    assert "the scheduler decides" in refusal(capsys, "--config", str(file))
    file.write_text("qwertz: 2\n")
    assert "unknown key qwertz" in refusal(capsys, "--config", str(file))


def test_a_variable_of_vllm_counts_where_nothing_else_sets_the_option() -> None:
    environ = {
        "VLLM_API_KEY": "a",
        "VLLM_LOGGING_LEVEL": "WARN",
        "VLLM_USE_V1": "1",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    }
    found = serve(**environ)
    assert found.others == {"api_key": ["a"], "log_level": "warning", "allow_long_max_model_len": True}
    assert found.notes == [
        "used from vLLM's environment variables: VLLM_ALLOW_LONG_MAX_MODEL_LEN as --allow-long-max-model-len,"
        " VLLM_API_KEY as --api-key, VLLM_LOGGING_LEVEL as --log-level",
        "without effect here: VLLM_USE_V1",
    ]
    assert serve("--api-key", "b", **environ).others["api_key"] == ["b"]
    assert serve(BATON__SERVE__API_KEY="c", **environ).others["api_key"] == ["c"]
    assert serve(VLLM_ALLOW_LONG_MAX_MODEL_LEN="0").others == {}


def test_memory_for_the_kv_cache_of_cpus_counts_on_cpus_alone() -> None:
    assert serve("--device", "cpu", VLLM_CPU_KVCACHE_SPACE="2").others["kv_cache_memory_bytes"] == 2 * 2**30
    found = serve(VLLM_CPU_KVCACHE_SPACE="2")
    assert "kv_cache_memory_bytes" not in found.others and "--device cpu" in found.notes[0]


@pytest.mark.parametrize(
    ("variable", "text", "option", "value"),
    [
        ("VLLM_CPU_OMP_THREADS_BIND", "0-3", "omp_threads_bind", "0-3"),
        ("VLLM_CPU_OMP_THREADS_BIND", "all", "omp_threads_bind", "auto"),
        ("VLLM_IMAGE_FETCH_TIMEOUT", "9", "image_fetch_timeout_s", 9.0),
        ("VLLM_ENGINE_ITERATION_TIMEOUT_S", "60", "engine_step_timeout_s", 60.0),
        ("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "5", "keep_alive_timeout_s", 5.0),
        ("VLLM_LOGGING_LEVEL", "DEBUG", "log_level", "debug"),
        ("VLLM_XPU_FP8_DTYPE", "e5m2", "fp8_dtype", "e5m2"),
    ],
)
def test_a_variable_of_vllm_sets_the_option_of_the_same_meaning(
    variable: str, text: str, option: str, value: object
) -> None:
    assert serve(**{variable: text}).others == {option: value}


def test_an_instance_takes_its_address_from_vllms_variables_and_not_from_those_of_kubernetes() -> None:
    found = instance("m", VLLM_HOST_IP="10.0.0.7", VLLM_INSTANCE_ID="d-0", VLLM_PORT="9000").settings
    assert (found.advertise_host, found.instance_id, found.rpc_port) == ("10.0.0.7", "d-0", 9000)
    service = {"VLLM_PORT": "tcp://10.0.0.1:80", "VLLM_SERVICE_HOST": "10.0.0.1", "VLLM_PORT_80_TCP_ADDR": "10.0.0.1"}
    ignored = instance("m", **service)
    assert ignored.settings == InstanceSettings(model="m") and ignored.notes == []


def test_a_wrong_variable_of_vllm_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve(VLLM_IMAGE_FETCH_TIMEOUT="soon")
    assert "VLLM_IMAGE_FETCH_TIMEOUT: 'soon' is not allowed" in capsys.readouterr().err

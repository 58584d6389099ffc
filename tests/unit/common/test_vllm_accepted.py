"""Single flags and variables of vLLM: what changes nothing is accepted with a note, and the rest sets options."""

import json
from pathlib import Path

import pytest

from baton_serve.contracts.model_path import cache_folder, gguf_cache_folder
from baton_serve.services.common.settings.vllm_variables import without_vllm
from baton_serve.services.instance.settings import InstanceSettings
from baton_serve.services.router.settings import RouterSettings
from tests.unit.common.test_vllm_flags import instance, serve


@pytest.mark.parametrize(
    "argv",
    [
        ["--guided-decoding-backend", "xgrammar"],
        ["--max-parallel-loading-workers", "2"],
        ["--uvicorn-log-level", "info"],
        ["--tokenizer-mode", "slow"],
        ["--quantization-param-path", "scales.json"],
        ["--distributed-executor-backend", "mp"],
        ["--distributed-executor-backend", "ray"],
        ["--distributed-executor-backend", "external_launcher"],
        ["--fully-sharded-loras"],
        ["--collect-detailed-traces", "all"],
        ["--num-scheduler-steps", "8"],
    ],
)
def test_a_flag_whose_effect_is_given_in_any_case_is_accepted_with_a_note(argv: list[str]) -> None:
    found = serve("m", *argv)
    assert found.others == {}
    (note,) = found.notes
    assert note.startswith(argv[0]) and "changes nothing" in note


@pytest.mark.parametrize(
    ("variable", "text", "option", "value"),
    [
        ("VLLM_CPU_OMP_THREADS_BIND", "0-3", "omp_threads_bind", "0-3"),
        ("VLLM_XPU_FP8_DTYPE", "e5m2", "fp8_dtype", "e5m2"),
        ("VLLM_PP_LAYER_PARTITION", "10,12", "pipeline_layer_partition", "10,12"),
        ("VLLM_LOGGING_CONFIG_PATH", "/logging.json", "log_config_file", "/logging.json"),
        ("VLLM_CONFIGURE_LOGGING", "0", "log_level", "warning"),
        ("VLLM_ENGINE_ITERATION_TIMEOUT_S", "90", "engine_step_timeout_s", 90.0),
    ],
)
def test_a_variable_of_vllm_sets_the_option(variable: str, text: str, option: str, value: object) -> None:
    assert getattr(instance("m", **{variable: text}).settings, option) == value
    assert getattr(InstanceSettings(model="m"), option) != value


def test_the_time_out_of_images_is_read_from_vllms_variable() -> None:
    assert serve("m", VLLM_IMAGE_FETCH_TIMEOUT="7").others["image_fetch_timeout_s"] == 7.0
    assert RouterSettings(model="m").image_fetch_timeout_s != 7.0


def test_the_line_of_statistics_can_be_turned_off() -> None:
    assert serve("m", "--disable-log-stats").others["disable_log_stats"] is True


def test_keys_of_the_default_sampling_parameters_may_be_flags_of_their_own() -> None:
    given = ["--override-generation-config.temperature", "0.5", "--override-generation-config.top_k=7"]
    assert serve("m", *given).others["override_generation_config"] == {"temperature": 0.5, "top_k": 7}
    assert serve("m", "--generation-config", "/sampling").others["generation_config"] == "/sampling"


POET = {"name": "poet", "path": "/adapters/poet", "base_model_name": "llama"}


def test_adapters_are_stated_as_json_wherever_options_come_from(tmp_path: Path) -> None:
    both = ["a=/a", json.dumps(POET)]
    (tmp_path / "baton.yaml").write_text(json.dumps({"lora_modules": ["a=/a", POET]}))
    for found in (
        instance("m", "--lora-modules", *both),
        instance("m", "--lora-modules", "a=/a", "--lora-modules", json.dumps(POET)),
        instance("m", "--lora-modules", "a=/a", json.dumps([POET])),
        instance("m", BATON__DECODE__LORA_MODULES=json.dumps(["a=/a", POET])),
        instance("m", "--config", str(tmp_path / "baton.yaml")),
    ):
        assert found.settings.lora_modules == both
    of_variable = instance("m", BATON__DECODE__LORA_MODULES=f"{json.dumps(POET)}, {json.dumps(POET)}")
    assert of_variable.settings.lora_modules == [json.dumps(POET)] * 2
    assert instance("m", "--lora-dtype", "half").settings.lora_dtype == "float16"


def test_settings_of_load_formats_and_the_old_flag_for_one_of_them() -> None:
    given = instance("m", "--model-loader-extra-config.num_threads", "4", "--model-loader-extra-config", '{"a": 1}')
    assert given.settings.model_loader_extra_config == {"num_threads": 4, "a": 1}
    adapter = instance("m", "--load-format", "bitsandbytes", "--qlora-adapter-name-or-path", "/adapter")
    assert adapter.settings.model_loader_extra_config == {"qlora_adapter_name_or_path": "/adapter"}


def test_the_folder_of_caches_is_that_of_vllms_variable(tmp_path: Path) -> None:
    assert cache_folder({}) == Path.home() / ".cache" / "baton"
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/baton")
    both = {"XDG_CACHE_HOME": "/x", "VLLM_CACHE_ROOT": str(tmp_path)}
    assert cache_folder(both) == tmp_path / "baton"
    (tmp_path / "a.gguf").touch()
    assert gguf_cache_folder(tmp_path / "a.gguf", both).parent == tmp_path / "baton" / "gguf"
    # Processes of a cluster get their options as flags, but read this variable themselves.
    assert without_vllm({**both, "VLLM_PORT": "1"}) == both
    found = instance("m", VLLM_CACHE_ROOT=str(tmp_path), VLLM_CONFIG_ROOT="/c")
    assert [note for note in found.notes if "VLLM_CONFIG_ROOT" in note and "VLLM_CACHE_ROOT" not in note]

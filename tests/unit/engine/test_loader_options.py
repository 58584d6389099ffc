"""Settings of load formats: the keys of vLLM, and clear errors for all others."""

from pathlib import Path

import pytest

from baton_serve.contracts.flag_choices import LoadFormat
from baton_serve.contracts.loader_options import SHARD_PATTERN, loader_options
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.errors import ConfigError
from baton_serve.engine.model_folder import shard_paths


def test_keys_of_vllm_set_the_options_of_their_format() -> None:
    assert loader_options("auto", {}).copy_threads is None
    assert loader_options("safetensors", {"enable_multithread_load": True, "num_threads": 12}).copy_threads == 12
    assert loader_options("pt", {"enable_multithread_load": False, "num_threads": 12}).copy_threads == 1
    assert loader_options("sharded_state", {"pattern": "{part}-of-{rank}.safetensors"}).pattern.startswith("{part}")
    qlora = {"qlora_adapter_name_or_path": "/adapter"}
    assert loader_options("bitsandbytes", qlora).qlora_adapter_name_or_path == "/adapter"


@pytest.mark.parametrize(
    ("load_format", "given", "message"),
    [
        ("auto", {"threads": 3}, "'threads', but with load_format auto its keys are enable_multithread_load, num_"),
        ("sharded_state", {"num_threads": 3}, "'num_threads', but with load_format sharded_state its keys are pattern"),
        ("gguf", {"num_threads": 3}, "load_format gguf it has no settings"),
        ("dummy", {"pattern": "x"}, "load_format dummy it has no settings"),
        ("auto", {"num_threads": 0}, "Expected `int` >= 1"),
        ("auto", {"enable_multithread_load": "yes"}, "Expected `bool"),
        ("sharded_state", {"pattern": "rank-{rank}.safetensors"}, "with {rank} and {part} once each"),
        ("sharded_state", {"pattern": "../{rank}{part}.safetensors"}, "the name of a .safetensors file"),
    ],
)
def test_a_key_that_a_format_lacks_is_refused_by_name(
    load_format: LoadFormat, given: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match="model_loader_extra_config") as raised:
        EngineConfig(model="m", load_format=load_format, model_loader_extra_config=given).check()
    assert message in str(raised.value)


def test_files_of_ranks_are_found_by_their_pattern(tmp_path: Path) -> None:
    names = [
        "model-rank-0-part-0",
        "model-rank-10-part-1",
        "model-rank-0-part-2",
        "model-rank-x-part-0",
        "model",
        "7_0",
    ]
    for name in names:
        (tmp_path / f"{name}.safetensors").touch()
    found = shard_paths(tmp_path, SHARD_PATTERN)
    assert {rank: [path.name[11:-12] for path in paths] for rank, paths in found.items()} == {
        0: ["0-part-0", "0-part-2"], 10: ["10-part-1"],
    }  # fmt: skip
    assert list(shard_paths(tmp_path, "{part}_{rank}.safetensors")) == [0]

"""Every load format computes the same tokens as transformers on the same numbers."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton_serve.engine.config import EngineConfig
from baton_serve.engine.engine import Engine
from baton_serve.engine.errors import AdapterError, ConfigError, ModelError
from baton_serve.engine.loading.sharded_saving import save_sharded_state
from baton_serve.engine.offline.llm import LLM
from baton_serve.engine.offline.request_params import SamplingParams
from tests.adapters import write_adapter
from tests.e2e.cluster import Cluster, run_baton
from tests.e2e.test_equality import expected_tokens, prompt_of, served_tokens
from tests.engine.test_bitsandbytes import writer
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

PROMPT = prompt_of(40)
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 1 << 24}
SERVED = ("--dtype", "float32", "--disaggregation-min-tokens", "0", "--kv-cache-memory-bytes", "64M")


def answer(folder: Path, **settings: Any) -> list[int]:
    with LLM(str(folder), **SETTINGS, **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def take_weights(folder: Path) -> dict[str, Tensor]:
    """Remove the safetensors file of a model and return its weights."""
    weights: dict[str, Tensor] = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    return weights


def write_pickled(folder: Path, **options: Any) -> None:
    torch.save(take_weights(folder), folder / "pytorch_model.bin", **options)


def write_pickled_parts(folder: Path) -> None:
    weights = take_weights(folder)
    weight_map = {name: f"pytorch_model-0000{1 + at % 2}-of-00002.bin" for at, name in enumerate(weights)}
    for file in set(weight_map.values()):
        torch.save({name: weights[name] for name in weights if weight_map[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def write_old_pickled(folder: Path) -> None:
    write_pickled(folder, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("load_format", ["auto", "pt", "npcache"])
@pytest.mark.parametrize("write", [write_pickled, write_pickled_parts, write_old_pickled])
def test_files_of_pytorch_are_read(write: Callable[[Path], None], load_format: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    expected = expected_tokens(folder, PROMPT, 8)
    write(folder)
    assert answer(folder, load_format=load_format) == expected


def test_a_family_of_transformers_and_ranks_read_files_of_pytorch(tmp_path: Path) -> None:
    falcon, llama = write_tiny_model(tmp_path / "falcon", "falcon"), write_tiny_model(tmp_path / "llama")
    expected = [expected_tokens(folder, PROMPT, 8) for folder in (falcon, llama)]
    write_pickled_parts(falcon)
    write_pickled_parts(llama)
    assert answer(falcon) == expected[0]
    with Cluster(llama, args=(*SERVED, "--load-format", "pt", "-tp", "2")) as cluster:
        assert served_tokens(cluster, PROMPT, 8) == expected[1]


def test_weights_of_pytorch_are_rounded_as_those_of_safetensors_are(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    expected = answer(folder, quantization="sym_int4")
    write_pickled(folder)
    assert answer(folder, quantization="sym_int4") == expected


def test_other_weights_have_another_fingerprint(tmp_path: Path) -> None:
    found: list[str] = []
    for seed in (0, 1, 1):
        folder = write_tiny_model(tmp_path / str(len(found)), seed=seed)
        write_pickled(folder)
        own: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_bytes": 1 << 24}
        with Engine(EngineConfig(model=str(folder), **own)) as engine:
            found.append(engine.layout.fingerprint)
    assert found[0] != found[1] and found[1] == found[2]


class Hostile:
    """An object that writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_code_in_a_file_of_pytorch_does_not_run(tmp_path: Path) -> None:
    folder, mark = write_tiny_model(tmp_path / "model"), tmp_path / "ran"
    torch.save({**take_weights(folder), "x": Hostile(mark)}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be loaded"):
        answer(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Hostile(mark), protocol=2))
    with pytest.raises(ModelError, match="cannot be loaded"):
        answer(folder)
    assert not mark.exists()


def rows(weight: Tensor, rank: int, ranks: int) -> Tensor:
    return weight.chunk(ranks)[rank]


def write_sharded(folder: Path, ranks: int) -> None:
    """Write the weights as vLLM's `save_sharded_state` does: joined layers, parts of ranks, a padded vocabulary."""
    config = json.loads((folder / "config.json").read_text())
    weights, kv_heads = take_weights(folder), config["num_key_value_heads"]
    copies = max(1, ranks // kv_heads)
    for rank in range(ranks):
        part: dict[str, Tensor] = {}
        for name, weight in weights.items():
            if ".q_proj." in name:
                kv = [weights[name.replace(".q_proj.", other)] for other in (".k_proj.", ".v_proj.")]
                own = [rows(each, rank // copies, ranks // copies) for each in kv]
                part[name.replace(".q_proj.", ".qkv_proj.")] = torch.cat([rows(weight, rank, ranks), *own])
            elif ".gate_proj." in name:
                up = weights[name.replace(".gate_proj.", ".up_proj.")]
                both = [rows(weight, rank, ranks), rows(up, rank, ranks)]
                part[name.replace(".gate_proj.", ".gate_up_proj.")] = torch.cat(both)
            elif name.endswith((".o_proj.weight", ".down_proj.weight")):
                part[name] = weight.chunk(ranks, dim=1)[rank].contiguous()
            elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
                padded = torch.cat([weight, torch.zeros(-len(weight) % 64, weight.shape[1])])
                part[name] = rows(padded, rank, ranks).clone()
            elif not any(each in name for each in (".k_proj.", ".v_proj.", ".up_proj.")):
                part[name] = weight
        names = sorted(part)
        for number, some in enumerate((names[::2], names[1::2])):
            save_file({name: part[name] for name in some}, folder / f"model-rank-{rank}-part-{number}.safetensors")


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_sharded_state_of_any_number_of_ranks_is_joined(family: str, ranks: int, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, family)
    expected = expected_tokens(folder, PROMPT, 8)
    write_sharded(folder, ranks)
    assert answer(folder, load_format="sharded_state") == expected


def test_sharded_state_lacks_a_rank_or_is_of_another_family(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "llama")
    with pytest.raises(ModelError, match=r"has no model-rank-\{rank\}-part-\{part\}"):
        answer(folder, load_format="sharded_state")
    write_sharded(folder, 2)
    for part in (0, 1):
        (folder / f"model-rank-0-part-{part}.safetensors").unlink()
    with pytest.raises(ModelError, match=r"it has the ranks \[1\]"):
        answer(folder, load_format="sharded_state")
    falcon = write_tiny_model(tmp_path / "falcon", "falcon")
    (falcon / "model.safetensors").rename(falcon / "model-rank-0-part-0.safetensors")
    with pytest.raises(ModelError, match="of a model of type falcon is not supported"):
        answer(falcon, load_format="sharded_state")


@pytest.mark.parametrize("settings", [{"load_format": "bitsandbytes"}, {"quantization": "bitsandbytes"}])
def test_bitsandbytes_rounds_linear_layers_to_nf4(settings: dict[str, str], tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", hidden_size=64, intermediate_size=128)
    rounded = write_tiny_model(tmp_path / "rounded", hidden_size=64, intermediate_size=128)
    write, weights = writer("nf4", block=64), load_file(folder / "model.safetensors")
    linear = [name for name in weights if name.endswith("_proj.weight")]
    save_file(
        {**weights, **{name: write(weights[name]).numbers for name in linear}},
        rounded / "model.safetensors",
        metadata={"format": "pt"},
    )
    expected = expected_tokens(rounded, PROMPT, 8)
    assert expected != expected_tokens(folder, PROMPT, 8)
    assert answer(folder, **settings) == expected


def test_a_cluster_rounds_to_nf4_with_the_flags_of_vllm(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, hidden_size=64, intermediate_size=128)
    flags = ("--load-format", "bitsandbytes", "--quantization", "bitsandbytes")
    with Cluster(folder, args=(*SERVED, *flags)) as cluster:
        assert served_tokens(cluster, PROMPT, 8) == answer(folder, quantization="bitsandbytes")


def test_other_formats_are_refused_with_what_to_use(tmp_path: Path) -> None:
    for name, remedy in (("tensorizer", "convert the model to safetensors"), ("runai_streamer", "`baton pull`")):
        ended = run_baton("serve", str(tmp_path), "--load-format", name)
        assert ended.returncode == 2 and f"{name} is not supported" in ended.stderr and remedy in ended.stderr
        with pytest.raises(ConfigError, match=f"{name} is not supported"):
            answer(tmp_path, load_format=name)
    ended = run_baton("serve", str(tmp_path), "--load-format", "zip")
    assert ended.returncode == 2 and "one of auto, safetensors, pt, npcache, sharded_state" in ended.stderr
    with pytest.raises(ConfigError, match="use one of the two"):
        answer(write_tiny_model(tmp_path), load_format="bitsandbytes", quantization="fp8")
    with pytest.raises(ModelError, match=r"has no pytorch_model\.bin files"):
        answer(tmp_path, load_format="pt")
    assert answer(tmp_path, load_format="safetensors") == expected_tokens(tmp_path, PROMPT, 8)


@pytest.mark.parametrize("ranks", [1, 2])
def test_sharded_state_is_saved_for_one_rank_and_for_two(ranks: int, tmp_path: Path) -> None:
    folder, saved = write_tiny_model(tmp_path / "model", "qwen2"), tmp_path / "saved"
    expected = expected_tokens(folder, PROMPT, 8)
    with LLM(str(folder), tensor_parallel_size=ranks, **SETTINGS) as llm:
        llm.save_sharded_state(str(saved), max_size=200_000)
        with pytest.raises(ConfigError, match="has weights already"):
            llm.save_sharded_state(str(saved))
    files = [path.name for path in saved.glob("*.safetensors")]
    assert {name[:13] for name in files} == {f"model-rank-{rank}-" for rank in range(ranks)} and len(files) >= 2 * ranks
    sharded = {"load_format": "sharded_state"}
    # The number of ranks that load it may differ from that for which it was saved.
    assert answer(saved, **sharded) == expected
    assert answer(saved, tensor_parallel_size=2, **sharded) == expected


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_saved_files_are_those_of_vllm(ranks: int, tmp_path: Path) -> None:
    folder, saved = write_tiny_model(tmp_path / "model", tie_word_embeddings=ranks == 4), tmp_path / "saved"
    model, name = EngineConfig(model=str(folder), tensor_parallel_size=ranks), "r{rank}_{part}.safetensors"
    save_sharded_state(model, saved, pattern=name)
    assert (saved / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    named = {"load_format": "sharded_state", "model_loader_extra_config": {"pattern": name}}
    expected = expected_tokens(folder, PROMPT, 8)
    assert answer(saved, **named) == expected
    with pytest.raises(ModelError, match=r"has no model-rank-\{rank\}-part-\{part\}"):
        answer(saved, load_format="sharded_state")
    write_sharded(folder, ranks)
    for rank in range(ranks):
        written: dict[str, Tensor] = {}
        for path in folder.glob(f"model-rank-{rank}-*.safetensors"):
            written |= load_file(path)
        found = load_file(saved / f"r{rank}_0.safetensors")
        # A tied head is stored once.
        assert {key: tensor.shape for key, tensor in written.items() if key in found or ranks != 4} == {
            key: tensor.shape for key, tensor in found.items()
        }
        assert all(torch.equal(tensor, written[key]) for key, tensor in found.items())


def test_the_command_saves_a_folder_and_says_how_to_serve_it(tmp_path: Path) -> None:
    folder, saved = write_tiny_model(tmp_path / "model"), tmp_path / "saved"
    ended = run_baton("save-sharded-state", str(folder), str(saved), "-tp", "2", "--dtype", "bfloat16")
    assert ended.stdout == f"baton serve {saved} --load-format sharded_state --tensor-parallel-size 2\n", ended.stderr
    stored = load_file(saved / "model-rank-1-part-0.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    ended = run_baton("save-sharded-state", str(write_tiny_model(tmp_path / "falcon", "falcon")), str(tmp_path / "x"))
    assert ended.returncode == 1 and "a model of type falcon cannot be saved" in ended.stderr
    ended = run_baton("save-sharded-state", str(folder), str(tmp_path / "x"), "-tp", "3")
    assert ended.returncode == 1 and "cannot be divided among 3 ranks" in ended.stderr
    adapted = EngineConfig(model=str(folder), enable_lora=True)
    with pytest.raises(ConfigError, match="saves no adapters"):
        save_sharded_state(adapted, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_only_the_layers_of_an_adapter_are_rounded(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", hidden_size=64, intermediate_size=128)
    rounded = write_tiny_model(tmp_path / "rounded", hidden_size=64, intermediate_size=128)
    adapter = write_adapter(tmp_path / "adapter", folder, targets=("q_proj", "down_proj"))
    write, weights = writer("nf4", block=64), load_file(folder / "model.safetensors")
    ends = (".q_proj.weight", ".down_proj.weight")
    changed = {name: write(weights[name]).numbers for name in weights if name.endswith(ends)}
    save_file({**weights, **changed}, rounded / "model.safetensors", metadata={"format": "pt"})
    expected = expected_tokens(rounded, PROMPT, 8)
    assert expected != answer(folder, load_format="bitsandbytes")
    qlora = {"load_format": "bitsandbytes", "model_loader_extra_config": {"qlora_adapter_name_or_path": str(adapter)}}
    assert answer(folder, **qlora) == expected
    (adapter / "adapter_config.json").write_text('{"r": 4, "target_modules": "all-linear"}')
    with pytest.raises(AdapterError, match="is not a list of names"):
        answer(folder, **qlora)

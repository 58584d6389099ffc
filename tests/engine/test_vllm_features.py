"""Features of the engine that users of vLLM know, each shown by one test because no other test covers it."""

import json
import shutil
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton_serve import LLM, SamplingParams
from baton_serve.engine import device as devices
from tests.engine.conftest import References
from tests.engine.driving import make_engine, make_work, run

VLLM_DEFAULTS = {
    "n": 1,
    "best_of": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "seed": None,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "stop": None,
    "stop_token_ids": None,
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "logits_processors": None,
    "include_stop_str_in_output": False,
    "truncate_prompt_tokens": None,
    "output_text_buffer_length": 0,
}


def test_sampling_params_have_the_names_and_defaults_of_vllm() -> None:
    given = {field.name: getattr(SamplingParams(), field.name) for field in fields(SamplingParams)}
    assert {name: given[name] for name in VLLM_DEFAULTS} == VLLM_DEFAULTS


def test_llm_takes_the_arguments_of_vllm_with_their_defaults(references: References) -> None:
    reference = references("llama")
    arguments: dict[str, Any] = {
        "tokenizer": None,
        "tokenizer_mode": "auto",
        "skip_tokenizer_init": False,
        "trust_remote_code": False,
        "tensor_parallel_size": 1,
        "dtype": "auto",
        "quantization": None,
        "revision": None,
        "tokenizer_revision": None,
        "seed": 0,
        "gpu_memory_utilization": 0.9,
        "swap_space": 4,
        "cpu_offload_gb": 0,
        "enforce_eager": None,
        "max_seq_len_to_capture": 8192,
        "disable_custom_all_reduce": False,
        "disable_async_output_proc": False,
    }
    with LLM(str(reference.folder), **arguments) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=len(reference.answers[0]), ignore_eos=True)
        (output,) = llm.generate([reference.prompts[0]], greedy, use_tqdm=False)
    assert output.outputs[0].token_ids == reference.answers[0]


def test_a_step_has_512_tokens_on_hosts_and_2048_on_devices_if_nothing_is_set() -> None:
    assert devices.defaults(torch.device("cpu")).max_num_batched_tokens == 512
    assert devices.defaults(torch.device("xpu")).max_num_batched_tokens == 2048
    assert devices.defaults(torch.device("xpu")).block_tokens == 64


def test_the_kv_cache_gets_what_weights_and_steps_leave_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # A device of 1,000 bytes, of which the weights occupy 300.
    monkeypatch.setattr(devices, "memory", lambda device: SimpleNamespace(total_bytes=1000, free_bytes=700))
    monkeypatch.setattr(devices, "_module", lambda device: SimpleNamespace(empty_cache=lambda: None))
    sizes = [
        devices.kv_cache_bytes(torch.device("xpu"), memory_utilization=part, activation_bytes=50) for part in (0.9, 0.5)
    ]
    assert sizes == [900 - 300 - 50, 500 - 300 - 50]


@pytest.mark.slow
def test_without_the_own_all_reduce_ranks_answer_alike(references: References) -> None:
    reference = references("llama")
    with make_engine(reference.folder, tensor_parallel_size=2, disable_custom_all_reduce=True) as engine:
        engine.add(make_work(engine, "a", reference.prompts[0]))
        assert run(engine)["a", 0] == reference.answers[0]


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own_llama"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.is_own = True
"""


def test_a_model_with_its_own_code_is_served_where_the_flag_trusts_it(
    references: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    reference = references("llama")
    folder = shutil.copytree(reference.folder, tmp_path / "own")
    (folder / "own.py").write_text(OWN_CODE)
    config = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    config |= {"model_type": "own_llama", "architectures": ["OwnForCausalLM"], "auto_map": own}
    (folder / "config.json").write_text(json.dumps(config))
    with make_engine(folder, trust_remote_code=True) as engine:
        for number, prompt in enumerate(reference.prompts):
            engine.add(make_work(engine, str(number), prompt))
        answers = run(engine)
    assert [answers[str(number), 0] for number in range(len(answers))] == reference.answers

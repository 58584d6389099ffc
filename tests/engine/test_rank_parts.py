"""Every family and every weight format gives the same tokens on several ranks as on one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from baton_serve.engine import Engine
from baton_serve.engine.collectives.shard import Shard
from baton_serve.engine.errors import UnsupportedModelError
from baton_serve.engine.kv.kv_cache import KVMemoryKind
from baton_serve.engine.model.rank_parts import SplitRules, split
from tests.adapters import write_adapter
from tests.engine.conftest import ANSWER_TOKENS, References
from tests.engine.driving import hand_over, make_engine, make_work, place_kv_caches, run
from tests.engine.rank_threads import use_threads
from tests.engine.test_adapters import PROMPT, adapted, expected_of, lora_engine
from tests.engine.test_packed import prompt_logprobs, values
from tests.families import HYBRIDS
from tests.tiny_models import write_tiny_model
from tools.model_verdicts import generating_families
from tools.sweep_families import compare, tiny_llm
from tools.sweep_families import prompts as prompts_of_sweep
from tools.tiny_families import write_family

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_threads(monkeypatch)
    yield


def answers_of(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    for number, prompt in enumerate(prompts):
        engine.add(make_work(engine, str(number), prompt))
    answers = run(engine)
    return [answers[str(number), 0] for number in range(len(prompts))]


FUSED = [
    "cohere",
    "cohere_norms",
    "cwm",
    "ernie4_5_moe",
    "exaone4",
    "gemma2",
    "gemma3",
    "glm4",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "helium",
    "mixtral",
    "olmo3",
    "olmoe",
    "phi3",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
    "smollm3",
    "stablelm",
    "starcoder2",
    "vaultgemma",
]
"""Families of which each differs from Llama in another way."""
OWN = [
    "bloom",
    "codegen",
    "deepseek_v2",
    "deepseek_v3",
    "falcon",
    "falcon_alibi",
    "falcon_gqa",
    "gemma3n",
    "gemma4",
    "gemma4_moe",
    "glm4_moe_lite",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "hunyuan_v1_moe",
    "llama4_text",
    "mimo_v2_flash",
    "minicpm3",
    "nemotron",
    "opt",
    "phi",
]
"""Families whose layers run through transformers."""
DIVIDED = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]
"""Hybrids whose ranks hold some of the heads of linear attention, and their states."""
UNDIVIDED = ["mamba", "falcon_mamba", "mamba2", "zamba2"]
"""Hybrids that are refused: without attention and MLPs, or with adapters of shared weights."""
FOUR = ["llama", "olmo3", "gemma4", "falcon_gqa"]
"""Families with fewer KV heads than four, which several ranks hold."""


@pytest.mark.parametrize(
    ("family", "size"), [*((family, 2) for family in (*FUSED, *OWN)), *((family, 4) for family in FOUR)]
)
def test_greedy_tokens_equal_transformers(family: str, size: int, references: References) -> None:
    reference = references(family)
    with make_engine(reference.folder, tensor_parallel_size=size, max_num_batched_tokens=48) as engine:
        assert answers_of(engine, reference.prompts) == reference.answers


@pytest.mark.parametrize("family", [family for family in HYBRIDS if family not in UNDIVIDED])
def test_hybrids_answer_as_transformers(family: str, references: References) -> None:
    """In chunks, and from a checkpoint."""
    reference = references(family)
    with make_engine(reference.folder, tensor_parallel_size=2, max_num_batched_tokens=24) as engine:
        assert answers_of(engine, reference.prompts) == reference.answers
        before = engine.stats().prefix_hit_tokens
        assert answers_of(engine, reference.prompts[3:]) == reference.answers[3:]
        assert engine.stats().prefix_hit_tokens == before + 96 + 48
        # Each rank has half of the states of divided layers, and all of others.
        own = engine._memory.states._own._rows.shape[1]  # type: ignore[attr-defined]
        whole = engine.layout.state_bytes
        assert own == whole // 2 if family in DIVIDED else own >= whole


KINDS = ["aria_text", "beam", "bitnet", "dbrx", "flex_olmo", "hy_v4", "jetmoe", "longcat_flash"]


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_other_kinds_are_divided(kind: str, tmp_path: Path) -> None:
    """Norms over the columns of all ranks, biases of gates, experts whose weights are joined or that have none."""
    reference = write_family(kind, generating_families()[kind], tmp_path)
    prompts, _ = prompts_of_sweep()
    for settings in ({"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}, {"enable_expert_parallel": True}):
        with tiny_llm(tmp_path, **{"tensor_parallel_size": 2, **settings}) as llm:
            assert not compare(llm, reference, calls=[prompts[:2]])


@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize(
    "kind", ["aria_text", "dbrx", "gpt_oss", "jetmoe", "llama4_text", "longcat_flash", "nemotron_h"]
)
def test_no_rank_holds_all_of_all_experts(kind: str, by_expert: bool, tmp_path: Path) -> None:
    reference = write_family(kind, generating_families()[kind], tmp_path)
    ranks = [split(reference, kind, Shard(rank, 2), SplitRules(by_expert=by_expert)) for rank in range(2)]
    mixtures = {
        name: module
        for name, module in reference.named_modules()
        if type(module).__name__ in ("DbrxExperts", "JetMoeMoE") or isinstance(find(module, "down_proj"), nn.Parameter)
    }
    assert mixtures and set(ranks[0].experts) == (set(mixtures) if by_expert else set())
    for name, held in ranks[0].experts.items():
        assert held.start == 0 and held.stop == ranks[1].experts[name].start
    weights = {
        f"{name}.{leaf}"
        for name, module in mixtures.items()
        for leaf, weight in module.named_parameters()
        if weight.dim() == 3 or leaf.startswith("mlp.")
    }
    assert weights and all(weights <= set(parts.tensors) for parts in ranks)


def find(module: nn.Module, name: str) -> object:
    return module._parameters.get(name)


@pytest.mark.parametrize("family", UNDIVIDED)
def test_hybrids_that_cannot_be_divided_say_so(family: str, references: References) -> None:
    with pytest.raises(UnsupportedModelError, match="the largest number that works is 1"):
        make_engine(references(family).folder, tensor_parallel_size=2)


@pytest.mark.parametrize("place", ["shared", "mirrored"])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "nemotron_h"])
def test_checkpoints_of_one_rank_and_of_two_are_the_same_bytes(
    family: str, place: KVMemoryKind, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are preempted too, and get further answers. Ranks on devices keep blocks in a mirror."""
    reference = references(family)
    prompts, answers = reference.prompts, reference.answers
    with make_engine(reference.folder) as one:
        num_blocks = 160 // 16 + 3 * one.layout.state_blocks
        settings = {"num_gpu_blocks_override": num_blocks, "max_model_len": 128, "max_num_batched_tokens": 24}
        if place == "mirrored":
            place_kv_caches(monkeypatch, place)
        with make_engine(reference.folder, tensor_parallel_size=2, **settings) as two:
            assert one.layout == two.layout
            for source, sink in ((one, two), (two, one)):
                assert hand_over(source, sink, make_work(source, "over", prompts[3]))["over", 0] == answers[3]
            assert answers_of(two, prompts[:3] * 2) == answers[:3] * 2
            two.add(make_work(two, "several", prompts[4], sequences=2))
            assert run(two) == {("several", number): answers[4] for number in range(2)}


@pytest.mark.parametrize("family", ["llama", "phi"])
def test_adapters_change_the_parts_of_all_ranks(family: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", family)
    targets = {"targets": ("q_proj", "dense", "fc1", "fc2")} if family == "phi" else {}
    adapters = [write_adapter(tmp_path / name, model, rank=8, seed=seed, **targets) for seed, name in enumerate("ab")]
    expected = expected_of(model, adapters, PROMPT)
    assert len(set(map(tuple, expected.values()))) == 3
    with lora_engine(model, adapters[0], tensor_parallel_size=2, max_loras=2, max_cpu_loras=2) as engine:
        engine.adapters.load("b", str(adapters[1]))
        for name in expected:
            engine.add(adapted(engine, name, PROMPT, name))
        assert run(engine) == {(name, 0): tokens for name, tokens in expected.items()}
        engine.adapters.unload("b")
        engine.adapters.collect()
        engine.add(adapted(engine, "again", PROMPT, "a"))
        assert run(engine)["again", 0] == expected["a"]


WHOLE_EXPERTS = ["gpt_oss", "glm4_moe", "qwen3_moe", "deepseek_v3", "hunyuan_v1_moe", "llama4_text", "nemotron_h"]


@pytest.mark.parametrize("family", WHOLE_EXPERTS)
def test_ranks_hold_whole_experts(family: str, references: References) -> None:
    reference = references(family)
    with make_engine(reference.folder, tensor_parallel_size=2, enable_expert_parallel=True) as engine:
        assert answers_of(engine, reference.prompts) == reference.answers


@pytest.mark.parametrize("family", ["hunyuan_v1_moe", "nemotron_h"])
def test_ranks_hold_whole_experts_in_bf16(family: str, references: References) -> None:
    """On some CPUs packed products take the place of transformers' experts."""
    reference = references(family)
    ranks = {"dtype": "bfloat16", "tensor_parallel_size": 2, "enable_prefix_caching": False}

    def reported(**settings: Any) -> Tensor:
        with make_engine(reference.folder, **settings) as engine:
            return values(prompt_logprobs(engine, reference.prompts))

    exact, by_width = reported(enable_prefix_caching=False), reported(**ranks)
    by_expert = reported(**ranks, enable_expert_parallel=True)
    assert (by_expert - exact).abs().mean() < 1.2 * (by_width - exact).abs().mean()


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_ranks_hold_whole_experts_in_few_bits(family: str, references: References) -> None:
    folder, prompt = references(family).folder, references(family).prompts[3]
    rounded = {"quantization": "sym_int4", "quantization_group_size": 32}
    two_ranks = make_engine(folder, tensor_parallel_size=2, enable_expert_parallel=True, **rounded)
    with make_engine(folder, **rounded) as one, two_ranks as two:
        assert answers_of(two, [prompt]) == answers_of(one, [prompt])


@pytest.mark.parametrize("family", ["gemma4", "deepseek_v3", "qwen3_moe"])
def test_a_handoff_between_one_rank_and_two(family: str, references: References) -> None:
    """With chunks, prefix hits, preemption and replay; the layers of Gemma 4 have KV of different shapes."""
    reference = references(family)
    prompts, answers = reference.prompts, reference.answers
    small = {"num_gpu_blocks_override": 16, "max_model_len": 120, "block_size": 8, "max_num_batched_tokens": 24}
    two_ranks = make_engine(reference.folder, tensor_parallel_size=2, **small)
    with make_engine(reference.folder, block_size=8) as one, two_ranks as two:
        assert one.layout == two.layout
        for source, sink in ((one, two), (two, one)):
            assert hand_over(source, sink, make_work(source, "over", prompts[3]))["over", 0] == answers[3]
        for _ in range(2):  # again from the prefix cache
            assert answers_of(two, prompts[:3] * 2) == answers[:3] * 2
        is_full = all(len(answer) == ANSWER_TOKENS for answer in answers[:3])  # some end early, and need less
        assert two.stats().preemptions > 0 or not is_full
        replayed = make_work(two, "replay", prompts[1] + answers[1][:5], num_prompt_tokens=len(prompts[1]))
        two.add(replayed)
        assert run(two)["replay", 0] == answers[1][5:]

"""Latent attention: what is cached, that it goes together with few-bit weights and one-byte KV, and that a CPU that
multiplies bf16 computes all layers in one call."""

import random
from pathlib import Path
from typing import Any

import pytest

from baton_serve.contracts.messages import TokenLogprobs
from baton_serve.engine.errors import ConfigError
from baton_serve.engine.model import fused_cpu
from tests.engine.conftest import References
from tests.engine.driving import hand_over, make_engine, make_work, run
from tests.engine.test_packed import can_pack, make, prompt_logprobs
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

RANK, ROTATED, LAYERS = 32, 16, 3
DENSE = {"v_head_dim": 32, "first_k_dense_replace": LAYERS}
"""Makes the tiny models of latent attention ones that one call of C++ supports."""

needs_packing = pytest.mark.skipif(not can_pack(), reason="needs a compiler and a CPU with bf16 dot products")


def test_a_block_holds_the_latents_and_nothing_else(references: References) -> None:
    with make_engine(references("minicpm3").folder, block_size=16) as engine:
        layout = engine.layout
        assert (layout.num_planes, layout.num_kv_heads, layout.head_dim) == (1, 1, RANK + ROTATED)
        assert layout.token_bytes == 4 * LAYERS * (RANK + ROTATED)


@pytest.mark.parametrize("settings", [{"quantization": "int8"}, {"kv_cache_dtype": "int8"}], ids=str)
def test_a_handoff_changes_nothing(references: References, settings: dict[str, str]) -> None:
    reference = references("minicpm3")
    prompt = reference.prompts[3]
    with make_engine(reference.folder, **settings) as source, make_engine(reference.folder, **settings) as sink:
        sink.add(make_work(sink, "here", prompt))
        alone = run(sink)["here", 0]
        assert len(set(alone)) > 3
        (answer,) = hand_over(source, sink, make_work(source, "there", prompt)).values()
        assert answer == alone


def test_contexts_beyond_the_tokens_that_an_indexer_chooses_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "deepseek_v32", index_topk=64)
    with pytest.raises(ConfigError, match=r"the 64 tokens that an indexer chooses .* set max_model_len to 64"):
        make_engine(folder, max_model_len=65)
    with make_engine(folder, max_model_len=64) as engine:
        assert engine.layout.num_planes == 1


def draw_prompts() -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(250) for _ in range(length)] for length in (70, 3, 41, 1)]


@needs_packing
@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "int8"}], ids=str)
@pytest.mark.parametrize("family", ["youtu", "deepseek_v2", "deepseek_v3"])
def test_one_call_gives_the_bits_of_the_layers(
    family: str, settings: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_model(tmp_path, family, **DENSE)
    calls = 0

    class Counted(fused_cpu.CpuForward):
        def __init__(self, *given: Any) -> None:
            nonlocal calls
            calls += 1
            super().__init__(*given)

    def reported() -> list[list[TokenLogprobs]]:
        with make(folder, **settings) as engine:
            return prompt_logprobs(engine, draw_prompts())

    monkeypatch.setattr(fused_cpu, "CpuForward", Counted)
    at_once = reported()
    assert calls == 1
    monkeypatch.setattr(fused_cpu, "fits", lambda *_: False)
    assert at_once == reported()
    assert calls == 1


@needs_packing
def test_bits_of_one_call_depend_on_nothing_but_the_tokens(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "youtu", **DENSE)
    with make(folder) as engine:
        together = prompt_logprobs(engine, draw_prompts())
    with make(folder, max_num_batched_tokens=17, max_num_seqs=2) as engine:
        assert [prompt_logprobs(engine, [prompt])[0] for prompt in draw_prompts()] == together

"""Latent attention: what is cached, and that it goes together with few-bit weights and one-byte KV."""

from pathlib import Path

import pytest

from baton_serve.engine.errors import ConfigError
from tests.engine.conftest import References
from tests.engine.driving import hand_over, make_engine, make_work, run
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

RANK, ROTATED, LAYERS = 32, 16, 3


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

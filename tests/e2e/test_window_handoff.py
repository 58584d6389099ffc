"""Handoffs and pulls of a model with cache groups: for layers with a sliding window, only the blocks that the next
token sees are sent. Tokens equal those of `transformers.generate`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.in_process import in_background
from tests.e2e.test_hybrid_prefixes import NEW_TOKENS, TRIES, ask, prompt_of
from tests.families import MAX_POSITIONS
from tests.tiny_models import load_reference, write_tiny_model

pytestmark = pytest.mark.slow

INSTANCE: dict[str, Any] = {
    "disable_hybrid_kv_cache_manager": False,
    "kv_cache_memory_bytes": 24 << 20,
    "max_model_len": MAX_POSITIONS,
    "host_kv_gb": 0.01,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("window"), "gemma3")


def greedy(folder: Path, prompt: list[int]) -> list[int]:
    """The answer with `ignore_eos`."""
    model: Any = load_reference(folder)
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_a_conversation_between_prefill_and_decode(folder: Path) -> None:
    with in_background(folder, instance=INSTANCE, kv_pull="always") as api:
        pulled = 0
        for number in range(TRIES):
            prompt = prompt_of(number, 203)
            first = ask(api, prompt)
            assert (first["decision"], first["tokens"]) == ("disaggregated", greedy(folder, prompt))
            # The decode worker has the whole prompt; prefill has computed all but its last token's answer.
            turn = [*prompt, *first["tokens"], *prompt_of(number + 50, 60)]
            second = ask(api, turn)
            assert (second["decision"], second["tokens"]) == ("disaggregated", greedy(folder, turn))
            assert second["cached"] >= 192
            pulled += second.get("pulled_tokens") or 0
        assert pulled % 16 == 0


def test_unified_instances_free_blocks_by_default(folder: Path) -> None:
    sizes = {**INSTANCE, "disable_hybrid_kv_cache_manager": None}
    with in_background(folder, instance=sizes, roles=("unified", "unified"), kv_pull="always") as api:
        for number in range(3):
            prompt = prompt_of(7, 120 + 90 * number)
            assert ask(api, prompt)["tokens"] == greedy(folder, prompt)

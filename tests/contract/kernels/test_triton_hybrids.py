"""Models with recurrent states through the Triton kernels of their mixers: the tokens of `transformers.generate`.

The tests of packed steps compare all families with `generate` by the twins of these kernels.
"""

from pathlib import Path

import pytest

from baton_serve.engine.kernels.triton import mixers, selective_scan
from tests.contract.kernels.triton_batches import DEVICE
from tests.engine.conftest import greedy_answer
from tests.engine.test_recurrent import PackedModel, PackedSequence, load
from tests.tiny_models import load_reference, write_tiny_model

LENGTHS = (5, 67)
"""Tokens of the prompts. The second has more than a chunk of the kernels."""
ANSWER_TOKENS = 3
FIRST_CHUNK = 65
"""Tokens of the longer prompt that are computed beside the shorter one. The rest is computed while it decodes."""


@pytest.mark.skipif(DEVICE.type != "cpu", reason="drives a model on the CPU")
@pytest.mark.parametrize("family", ["nemotron_h", "jamba", "kimi_linear", "minimax"])
def test_tokens_equal_generate(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter computes the channels of one program at the same time.
    monkeypatch.setattr(selective_scan, "TILE_CHANNELS", 128)
    monkeypatch.setattr(selective_scan, "CHUNK_TOKENS", 32)
    folder = write_tiny_model(tmp_path / family, family)
    reference = load_reference(folder)
    prompts = [[(7 * i * i + i + length) % 250 for i in range(length)] for length in LENGTHS]
    expected = [greedy_answer(reference, prompt, ANSWER_TOKENS) for prompt in prompts]
    model = PackedModel(load(folder), uses_kernels=False, mixers=mixers)
    first, second = (
        PackedSequence(slot, list(prompt), len(prompt)) for slot, prompt in zip((3, 1), prompts, strict=True)
    )
    steps = [[(first, len(first.tokens)), (second, FIRST_CHUNK)], [(first, 1), (second, LENGTHS[1] - FIRST_CHUNK)]]
    while len(first.answer) < ANSWER_TOKENS or len(second.answer) < ANSWER_TOKENS:
        chunks = steps.pop(0) if steps else [(first, 1), (second, 1)]
        for (sequence, _), logits in zip(chunks, model.step(chunks), strict=True):
            if sequence.computed == len(sequence.tokens):
                sequence.tokens.append(int(logits.argmax()))
    # An answer of `generate` may end before.
    assert [one.answer[: len(answer)] for one, answer in zip((first, second), expected, strict=True)] == expected

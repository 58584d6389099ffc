"""Towers that attend within windows: all windows of a layer are computed together, as if one by one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen

from baton_serve.engine.model.vision.window_attention import use_window_attention

DEPTH = 3


@pytest.fixture
def tower() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "depth": DEPTH}
    config = qwen.Qwen2_5_VLVisionConfig(**sizes, fullatt_block_indexes=[1], initializer_range=0.2)
    config._attn_implementation = "sdpa"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return qwen.Qwen2_5_VisionTransformerPretrainedModel(config).float().eval()


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Sequence[int]]]:
    shapes: list[Sequence[int]] = []
    own: Callable[..., Tensor] = F.scaled_dot_product_attention

    def attention(query: Tensor, *others: Tensor, **options: Any) -> Tensor:
        shapes.append(query.shape)
        return own(query, *others, **options)

    with monkeypatch.context() as patched:
        patched.setattr(F, "scaled_dot_product_attention", attention)
        yield shapes


@pytest.mark.parametrize(
    ("grid", "calls"),
    [
        # Windows of 8 x 8 patches, those at the right and the lower edge, and that in the corner.
        ((1, 22, 30), 1 + 3 * (DEPTH - 1)),
        ((1, 16, 32), DEPTH),
        ((2, 16, 12), 1 + 2 * (DEPTH - 1)),
        ((1, 2, 2), DEPTH),
    ],
)
@torch.inference_mode()
def test_windows_of_equal_length_are_computed_in_one_call(
    tower: Any, grid: tuple[int, int, int], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    patches = torch.randn(grid[0] * grid[1] * grid[2], 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(2))
    wanted = tower(patches, grid_thw=torch.tensor([grid])).pooler_output
    use_window_attention(tower)
    with counted(monkeypatch) as shapes:
        found = tower(patches, grid_thw=torch.tensor([grid])).pooler_output
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert len(shapes) == calls

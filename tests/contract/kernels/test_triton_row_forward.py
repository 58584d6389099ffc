"""A model's decode step through all layers in one kernel: the logits of its steps apart."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from baton_serve.contracts.block_layout import KVShape
from baton_serve.engine.collectives.backends import SingleRank
from baton_serve.engine.kernels import AttentionSpec
from baton_serve.engine.kernels.interfaces import RowLayer
from baton_serve.engine.kernels.reference.attention import ReferenceAttention
from baton_serve.engine.kernels.triton import layers as triton_layers
from baton_serve.engine.kernels.triton.persistent.launch import RowLayers, RowPlan, shape_of
from baton_serve.engine.model import fused_forward
from baton_serve.engine.model.batch_inputs import StepInputs
from baton_serve.engine.model.loaded_model import LoadedModel
from baton_serve.engine.model.quantized.formats import scheme
from baton_serve.engine.model.quantized.quantization_plan import QuantizationPlan, linear_names, quantize_layer
from tests.contract.kernels.triton_batches import DEVICE, Batch, random_batch

CONTEXT, HEADS, KV_HEADS, HEAD_DIM = 37, 4, 2, 64


def model_of() -> LoadedModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
    module = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).half().eval().to(DEVICE)
    plan = QuantizationPlan(scheme("sym_int4", fp8_dtype="e4m3", group_size=128))
    for name in linear_names(module):
        assert quantize_layer(module, name, module.get_submodule(name).weight.data, plan)
    specs = [AttentionSpec(HEAD_DIM**-0.5)] * 2
    shapes = (KVShape(KV_HEADS, HEAD_DIM),) * 2
    return LoadedModel(module, "tiny", torch.float16, 64, 64, shapes, specs, eos_token_ids=frozenset(), fingerprint="")


def inputs_of(batch: Batch) -> StepInputs:
    ids = torch.full((1,), 3, device=DEVICE)
    return StepInputs(ids, torch.full((1,), CONTEXT - 1, device=DEVICE), None, batch.meta)


@torch.inference_mode()
def test_a_decode_step_of_one_row_goes_through_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def made(
        device: torch.device,
        layers: Sequence[RowLayer],
        specs: Sequence[AttentionSpec],
        head_dim: int,
        kv_heads: int,
    ) -> RowLayers:
        shape = shape_of(layers, specs, head_dim, kv_heads)
        assert shape is not None
        return RowLayers(layers, shape, specs[0].scale, RowPlan(1, 256, token_tile=16, max_splits=4))

    call = RowLayers.__call__

    def counted(row: RowLayers, *given: Any) -> bool:
        calls.append(1)
        return call(row, *given)

    monkeypatch.setattr(RowLayers, "__call__", counted)
    batch = random_batch([1], [CONTEXT], heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float16)
    results = []
    for kernel in (None, made):
        monkeypatch.setattr(fused_forward, "row_kernel", kernel or (lambda *given: None))
        forward = fused_forward.FusedForward(model_of(), ReferenceAttention(), triton_layers, SingleRank())
        caches = [batch.cache.clone() for _ in range(2)]
        logits = forward(inputs_of(batch), caches)
        results.append((logits.float(), torch.stack(caches).float()))
    assert calls == [1]
    (apart, apart_kv), (found, found_kv) = results
    torch.testing.assert_close(found, apart, rtol=2e-2, atol=1e-2 * float(apart.abs().max()))
    torch.testing.assert_close(found_kv, apart_kv, rtol=1e-2, atol=1e-2, equal_nan=True)

"""`baton-bench engine`: the limits of a given model follow from its config."""

from pathlib import Path

import pytest

from baton_serve.bench.micro import engine as benchmark
from baton_serve.bench.micro.device_speeds import DeviceSpeeds
from baton_serve.bench.micro.engine_model_costs import model_costs
from baton_serve.bench.micro.engine_shapes import COUNTED_BY_CONFIG, SHAPES, costs, write_shape
from baton_serve.contracts.block_layout import KVLayout
from baton_serve.engine import EngineConfig
from tests.engine.conftest import References
from tests.engine.driving import make_engine
from tests.tiny_models import FAMILIES

pytestmark = pytest.mark.slow

EQUAL_LAYERS = sorted({name for name, shape in SHAPES.items() if "layer_types" not in shape} - COUNTED_BY_CONFIG)
"""Shapes that `costs` can count: it takes all layers for equal."""


def layout_of(name: str) -> KVLayout:
    shape = SHAPES[name]
    numbers = (shape[key] for key in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
    layers, kv_heads, head_dim = (int(str(number)) for number in numbers)
    return KVLayout(
        fingerprint="", num_layers=layers, num_kv_heads=kv_heads, block_tokens=16, head_dim=head_dim, dtype="bfloat16"
    )


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("shape", EQUAL_LAYERS)
def test_the_costs_of_a_shape_are_those_of_its_config(shape: str, quantization: str | None, tmp_path: Path) -> None:
    model = str(write_shape(shape, tmp_path / "model"))
    config = EngineConfig(model=model, load_format="dummy", quantization="int8" if quantization else None)
    assert model_costs(config, layout_of(shape)) == costs(shape, quantization)


def test_shared_experts_and_routers_are_dense(references: References) -> None:
    folder, values = references("qwen2_moe").folder, FAMILIES["qwen2_moe"]
    with make_engine(folder) as engine:
        found = model_costs(EngineConfig(model=str(folder)), engine.layout)
    hidden, layers, heads = values["hidden_size"], values["num_hidden_layers"], 2 * 4 + 2 * 2
    attention = hidden * heads * (hidden // 4)
    shared = 3 * hidden * values["shared_expert_intermediate_size"] + hidden
    assert found.expert_parameters == layers * 3 * hidden * values["moe_intermediate_size"]
    assert found.dense_parameters == layers * (attention + shared + hidden * values["num_experts"])
    assert (found.num_experts, found.top_k) == (4, 2)


def test_rows_of_a_model_are_compared_with_its_own_limits(
    references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = DeviceSpeeds(read=1e9, product=1e10)
    monkeypatch.setattr(benchmark, "measure_limits", lambda _: speeds)
    folder = references("granite").folder
    cases = "--batches 2 --context 32 --single 16 --prefill 2x16 --rounds 2 --steps 2 --max-model-len 256"
    options = benchmark.parser().parse_args(["--model", str(folder), "--device", "cpu", *cases.split()])
    rows = {row.case: row for row in benchmark.measure(options)}
    with make_engine(folder, dtype="bfloat16") as engine:
        cost = model_costs(EngineConfig(model=str(folder), load_format="dummy"), engine.layout)
    assert rows["decode 2 x 32"].limit == pytest.approx(1e3 * speeds.decode_s(cost, 2, 32 + 1 + 1))
    assert rows["first token 16"].limit == pytest.approx(1e3 * cost.prefill_flops(1, 16) / speeds.product)

"""A kernel that is wrong on its device: the instances and the router name it, and answers are right all the same."""

from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import torch
from torch import Tensor

from baton_serve.engine.execution import kernel_shapes
from baton_serve.engine.kernels.interfaces import LayerKernels
from baton_serve.engine.kernels.proved_kernels import KernelCandidates
from baton_serve.engine.kernels.prover import KernelCandidate
from baton_serve.engine.kernels.reference import layers as twin
from tests.e2e.in_process import in_background
from tests.tiny_models import load_reference, write_tiny_model

pytestmark = pytest.mark.slow

PROMPT = list(range(30, 80))


class WrongGate:
    """The twin's operations, with a gate that is wrong, and all that contains it."""

    def __getattr__(self, name: str) -> object:
        return getattr(twin, name)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return -twin.silu_mul(gate_up)

    def gated_linear(self, *given: Any) -> Tensor:
        return -cast(Tensor, twin.gated_linear(*given))


def test_health_names_it_and_the_twin_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_model(tmp_path / "model")
    wrong = KernelCandidate("injected", lambda: cast(LayerKernels, WrongGate()))
    monkeypatch.setattr(kernel_shapes, "kernel_candidates", lambda *_: KernelCandidates(layers=(wrong,)))
    monkeypatch.setattr(kernel_shapes, "proof_folder", lambda: tmp_path / "proofs")
    ids = torch.tensor([PROMPT])
    reference: Any = load_reference(folder)
    expected = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    with in_background(folder) as api:
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        answer = api.client.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["token_ids"] == expected[0, len(PROMPT) :].tolist()
        instances = api.client.get("/health").json()["instances"]
        assert [one["wrong_kernels"] for one in instances] == [["gate", "fused products"]] * 2
        for one in instances:
            own = httpx.get(f"http://{one['http_address']}/health").json()
            assert [(kernel["operation"], kernel["candidate"]) for kernel in own["wrong_kernels"]] == [
                ("gate", "injected"),
                ("fused products", "injected"),
            ]
            assert (
                own["wrong_kernels"][0]["difference"] == pytest.approx(2.0, rel=1e-3)
                and not own["wrong_kernels"][0]["is_right"]
            )

"""Kernels are compared with their twins before use: wrong ones are named, and others serve."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from baton_serve.contracts.instance import KernelVerdict
from baton_serve.engine.kernels.composition import ComposedAttention, ComposedLayers
from baton_serve.engine.kernels.cpu.decoder import DeltaStates
from baton_serve.engine.kernels.cpu.decoder_proof import (
    DecoderKernel,
    PackedDecoder,
    Rotation,
    SmallDecoder,
    SmallLayer,
    Step,
    TwinDecoder,
)
from baton_serve.engine.kernels.interfaces import (
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    LayerKernels,
    Linear,
    Norm,
)
from baton_serve.engine.kernels.library_kernels import LibraryAttention, PackageLayers
from baton_serve.engine.kernels.mixers import MixerShapes
from baton_serve.engine.kernels.operations import ProofShapes, WeightFormat, different_specs
from baton_serve.engine.kernels.proved_kernels import KernelCandidates, ProvedKernels, prove_kernels
from baton_serve.engine.kernels.prover import KernelCandidate, Made, Operation, Prover
from baton_serve.engine.kernels.reference import layers as twin_module
from baton_serve.engine.kernels.reference.attention import ReferenceAttention
from baton_serve.engine.kernels.selection import kernel_candidates

CPU = torch.device("cpu")
TWIN: LayerKernels = twin_module
SHAPES = ProofShapes(
    dtype=torch.float32,
    hidden=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_planes=2,
    block_tokens=16,
    scale_rows=0,
    cache_dtype=torch.float32,
    vocab_size=320,
    specs=(AttentionSpec(0.25),),
)
LATENT = replace(
    SHAPES,
    dtype=torch.bfloat16,
    cache_dtype=torch.bfloat16,
    num_planes=1,
    num_kv_heads=1,
    head_dim=48,
    specs=(AttentionSpec(0.2, value_dim=32),),
    mixers=MixerShapes(rank=32, rotary_size=16, num_latent_heads=4),
)
INT4 = WeightFormat("int4", 32, torch.bfloat16, has_zeros=False)


class Layers:
    """The operations of the twin, of which tests replace some."""

    def __getattr__(self, name: str) -> object:
        return getattr(twin_module, name)


class WrongNorm(Layers):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, **rules: object) -> Tensor:
        return 1.1 * twin_module.rms_norm(x, weight, eps, **rules)  # type: ignore[arg-type]


class RaisingGate(Layers):
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        raise RuntimeError("no such instruction\nand a second line")


class WrongProducts(Layers):
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return twin_module.linear(x, weight, bias) + 1


def prove(
    *layers: object, attention: AttentionBackend | None = None, folder: Path | None = None, shapes: ProofShapes = SHAPES
) -> ProvedKernels:
    found = KernelCandidates(
        attention=() if attention is None else (KernelCandidate("fake", lambda: attention),),
        layers=tuple(KernelCandidate(f"fake {number}", partial(_as_layers, one)) for number, one in enumerate(layers)),
    )
    return prove_kernels(found, shapes, CPU, folder=folder)


def _as_layers(layers: object) -> LayerKernels:
    return cast(LayerKernels, layers)


def wrong(kernels: ProvedKernels) -> list[str]:
    return list(dict.fromkeys(verdict.operation for verdict in kernels.verdicts if not verdict.is_right))


def test_kernels_that_are_right_are_used_as_they_are() -> None:
    layers, attention = Layers(), LibraryAttention()
    kernels = prove(layers, attention=attention)
    assert kernels.layers is _as_layers(layers) and kernels.attention is attention
    assert not wrong(kernels) and kernels.mixes_prompts


def test_a_wrong_kernel_is_named_with_its_difference_and_the_twin_serves(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        kernels = prove(WrongNorm())
    assert wrong(kernels) == ["norm"]
    (verdict,) = (one for one in kernels.verdicts if not one.is_right)
    assert verdict.difference == pytest.approx(0.1, abs=0.01) and "hidden size 64" in verdict.shape
    (line,) = caplog.messages
    assert "the kernel for norm of fake 0 is wrong" in line and "10.0" in line and "plain torch serves" in line
    x, weight = torch.randn(3, 64), torch.randn(64)
    assert torch.equal(kernels.layers.rms_norm(x, weight, 1e-6), twin_module.rms_norm(x, weight, 1e-6))
    # Everything else stays with the candidate.
    assert isinstance(kernels.layers, ComposedLayers) and isinstance(kernels.layers.products, WrongNorm)


def test_a_kernel_that_raises_is_named_with_the_first_line_of_its_error() -> None:
    kernels = prove(RaisingGate())
    assert wrong(kernels) == ["gate"]
    assert [one.error for one in kernels.verdicts if one.error] == ["RuntimeError: no such instruction"]
    x = torch.randn(3, 2 * 8)
    assert torch.equal(kernels.layers.silu_mul(x), twin_module.silu_mul(x))


def test_with_wrong_products_nothing_that_contains_one_is_used() -> None:
    kernels = prove(WrongProducts())
    assert wrong(kernels) == ["product", "fused products"]
    x, weight, norm = torch.randn(3, 64), torch.randn(32, 64), Norm(torch.ones(16), 1e-6)
    assert torch.equal(kernels.layers.linear(x, weight, None), twin_module.linear(x, weight, None))
    gated = kernels.layers.gated_linear(x, Linear(weight, None), weight)
    assert torch.equal(cast(Tensor, gated), twin_module.silu_mul(twin_module.linear(x, weight, None)))
    residual = torch.zeros(3, 16)
    back = Linear(torch.randn(16, 16), None)
    normed = kernels.layers.linear_norm(gated, back, residual, norm)
    assert torch.equal(residual, twin_module.linear(cast(Tensor, gated), back.weight, None))
    assert torch.equal(cast(Tensor, normed), twin_module.rms_norm(residual, norm.weight, norm.eps))


def test_another_candidate_serves_before_the_twin_does() -> None:
    good = Layers()
    kernels = prove(WrongNorm(), good)
    assert wrong(kernels) == ["norm"]
    assert isinstance(kernels.layers, ComposedLayers) and kernels.layers.norms is _as_layers(good)


def test_memory_that_a_kernel_leaves_unwritten_does_not_count_as_right() -> None:
    operation: Operation[Callable[[], Tensor]] = Operation("sum", "one row", lambda kernel: (kernel(),), 0.01)
    results = iter([torch.ones(4), torch.full((4,), torch.nan)])
    made = Made(KernelCandidate("racing", lambda: lambda: torch.ones(4)), lambda: next(results))
    (verdict,) = Prover(CPU, is_timed=False).prove(operation, lambda: torch.ones(4), [made])
    assert not verdict.is_right and verdict.difference is None and "NaN" in verdict.describe()


def test_of_right_kernels_a_clearly_faster_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"first": 1.0, "second": 0.95, "third": 0.5, "last": 0.1}
    prover = Prover(CPU, is_timed=True)
    operation: Operation[str] = Operation("name", "a word", lambda name: (torch.ones(1),), 0.0)
    monkeypatch.setattr(prover, "_time", lambda _, name: times[name])

    def chosen(*names: str) -> str:
        made = [Made(KernelCandidate(name, lambda: "", is_last=name == "last"), name) for name in names]
        (found,) = (one.candidate for one in prover.prove(operation, "twin", made) if one.is_chosen)
        return found

    assert chosen("first", "second") == "first"
    assert chosen("first", "second", "third") == "third"
    assert chosen("first", "last") == "first" and chosen("last") == "last"


class CountingNorm(Layers):
    calls = 0

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, **rules: object) -> Tensor:
        self.calls += 1
        return 1.1 * twin_module.rms_norm(x, weight, eps, **rules)  # type: ignore[arg-type]


def test_verdicts_are_kept_for_the_next_start_and_warned_of_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = prove(CountingNorm(), folder=tmp_path / "proofs")
    again = CountingNorm()
    with caplog.at_level(logging.WARNING):
        second = prove(again, folder=tmp_path / "proofs")
    assert first.verdicts == second.verdicts and again.calls == 0 and len(caplog.messages) == 2
    assert isinstance(second.layers, ComposedLayers) and not isinstance(second.layers.norms, CountingNorm)
    # Other shapes are proved by themselves, and a damaged file is replaced.
    prove(again, folder=tmp_path / "proofs", shapes=replace(SHAPES, hidden=96))
    assert again.calls > 0
    for file in (tmp_path / "proofs").iterdir():
        file.write_text("[{")
    assert prove(CountingNorm(), folder=tmp_path / "proofs").verdicts == first.verdicts


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert wrong(prove(WrongNorm(), folder=tmp_path / "file" / "proofs")) == ["norm"]


class Attention(ReferenceAttention):
    """Wrong by a factor for batches of some kind."""

    def __init__(self, is_wrong: Callable[[AttentionMetadata], bool]) -> None:
        self._is_wrong = is_wrong

    def attend(self, query: Tensor, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec) -> Tensor:
        return super().attend(query, cache, meta, spec) * (1.5 if self._is_wrong(meta) else 1.0)


def is_mixed(meta: AttentionMetadata) -> bool:
    lengths = meta.query_starts.diff()
    return bool((lengths == 1).any() and (lengths > 1).any())


def test_attention_that_must_not_mix_prompts_and_answers_is_found() -> None:
    attention = Attention(is_mixed)
    kernels = prove(attention=attention)
    assert wrong(kernels) == ["mixed attention"]
    assert not kernels.mixes_prompts and kernels.attention is attention


def test_if_attention_is_wrong_for_prompts_it_still_serves_decode_steps() -> None:
    attention = Attention(lambda meta: meta.max_query_len > 1)
    kernels = prove(attention=attention)
    assert wrong(kernels) == ["prefill attention", "mixed attention"] and kernels.mixes_prompts
    assert isinstance(kernels.attention, ComposedAttention)
    assert kernels.attention.decode is attention and type(kernels.attention.prefill) is ReferenceAttention


def test_the_kernels_of_this_cpu_are_right_for_all_kinds_of_models() -> None:
    specs = different_specs(
        [AttentionSpec(0.25), AttentionSpec(0.25, sliding_window=4096), AttentionSpec(0.25, softcap=30.0)]
    )
    for dtype in (torch.float32, torch.bfloat16):
        shapes = replace(SHAPES, dtype=dtype, cache_dtype=dtype, specs=specs, formats=(INT4,), has_experts=True)
        kernels = prove_kernels(kernel_candidates(CPU, dtype), shapes, CPU, folder=None)
        assert not wrong(kernels)
    hybrid = MixerShapes(num_key_heads=3, num_heads=6, key_size=24, value_size=20, taps=4)
    for dtype in (torch.float32, torch.bfloat16):
        shapes = replace(SHAPES, dtype=dtype, cache_dtype=dtype, mixers=hybrid)
        assert not wrong(prove_kernels(kernel_candidates(CPU, dtype), shapes, CPU, folder=None))
    coded = replace(SHAPES, cache_dtype=torch.int8, scale_rows=2)
    assert not wrong(prove_kernels(kernel_candidates(CPU, torch.float32), coded, CPU, folder=None))
    latent = replace(SHAPES, num_planes=1, num_kv_heads=1)
    assert not wrong(prove_kernels(kernel_candidates(CPU, torch.float32), latent, CPU, folder=None))
    assert not wrong(prove_kernels(kernel_candidates(CPU, torch.bfloat16), LATENT, CPU, folder=None))


def test_the_call_for_all_layers_is_not_proved_for_slopes_that_it_does_not_read() -> None:
    """Models with ALiBi have no fused layers, and more KV heads than the small decoders of the proof."""
    shapes = replace(
        SHAPES,
        dtype=torch.bfloat16,
        cache_dtype=torch.bfloat16,
        num_kv_heads=4,
        specs=(AttentionSpec(0.25, alibi=torch.tensor([0.25, 0.0625, 0.015625, 0.00390625])),),
    )
    kernels = prove_kernels(kernel_candidates(CPU, torch.bfloat16), shapes, CPU, folder=None)
    assert not kernels.has_decoder and not wrong(kernels)
    assert "decoder" not in {verdict.operation for verdict in kernels.verdicts}


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_the_call_for_all_layers_is_right_for_caches_of_codes(kind: torch.dtype, head_dim: int) -> None:
    decoders = kernel_candidates(CPU, torch.bfloat16).decoders
    specs = (AttentionSpec(head_dim**-0.5),)
    mixers = MixerShapes(num_key_heads=2, num_heads=4, key_size=16, value_size=16, taps=4)
    shapes = replace(SHAPES, dtype=torch.bfloat16, cache_dtype=kind, scale_rows=2, head_dim=head_dim, specs=specs)
    candidates = KernelCandidates(decoders=decoders)
    kernels = prove_kernels(candidates, replace(shapes, mixers=mixers), CPU, folder=None)
    assert kernels.has_decoder is bool(decoders) and not wrong(kernels)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_decoder_that_stores_nothing_is_found_for_caches_of_any_dtype(kind: torch.dtype) -> None:
    def forgetful(decoder: SmallDecoder) -> Step:
        right = TwinDecoder(decoder)
        return lambda residual, rotation, caches, *rest: right(residual, rotation, [c.clone() for c in caches], *rest)

    shapes = replace(SHAPES, dtype=torch.bfloat16, cache_dtype=kind, scale_rows=2 * (kind != torch.bfloat16))
    candidates = KernelCandidates(decoders=(KernelCandidate("fake", lambda: forgetful),))
    assert wrong(prove_kernels(candidates, shapes, CPU, folder=None)) == ["decoder"]


class WrongDecoder:
    def __call__(self, decoder: SmallDecoder) -> Step:
        right = TwinDecoder(decoder)
        return lambda *step: -right(*step)


@pytest.mark.parametrize(("decoder", "is_right"), [(WrongDecoder(), False), (TwinDecoder, True)])
def test_the_call_for_all_layers_is_proved_too(decoder: WrongDecoder, is_right: bool) -> None:
    shapes = replace(SHAPES, dtype=torch.bfloat16, cache_dtype=torch.bfloat16)
    candidates = KernelCandidates(decoders=(KernelCandidate("fake", lambda: decoder),))
    kernels = prove_kernels(candidates, shapes, CPU, folder=None)
    assert kernels.has_decoder is is_right and wrong(kernels) == ([] if is_right else ["decoder"])


@pytest.mark.parametrize(
    "rule", [{"residual_scale": 1.0}, {"is_gelu": False}, {"is_parallel": False}, {"is_interleaved": False}]
)
def test_a_decoder_that_ignores_a_rule_of_some_families_is_found(rule: dict[str, Any]) -> None:
    def ignoring(decoder: SmallDecoder) -> Step:
        return TwinDecoder(replace(decoder, rules=replace(decoder.rules, **rule)))

    shapes = replace(SHAPES, dtype=torch.bfloat16, cache_dtype=torch.bfloat16)
    candidates = KernelCandidates(decoders=(KernelCandidate("fake", lambda: ignoring),))
    kernels = prove_kernels(candidates, shapes, CPU, folder=None)
    assert not kernels.has_decoder
    assert wrong(kernels) == ["decoder"]


@pytest.mark.parametrize("rule", [{"keeps_order": False}, {"is_interleaved": False}, {"query_norm": None}])
def test_a_decoder_that_ignores_a_rule_of_latent_attention_is_found(rule: dict[str, Any]) -> None:
    def changed(layer: SmallLayer) -> SmallLayer:
        assert layer.latent is not None
        return replace(layer, latent=replace(layer.latent, **rule))

    def ignoring(decoder: SmallDecoder) -> Step:
        return TwinDecoder(replace(decoder, layers=list(map(changed, decoder.layers))))

    def proved(decoder: DecoderKernel) -> ProvedKernels:
        candidates = KernelCandidates(decoders=(KernelCandidate("fake", lambda: decoder),))
        return prove_kernels(candidates, LATENT, CPU, folder=None)

    assert proved(TwinDecoder).has_decoder
    kernels = proved(ignoring)
    assert not kernels.has_decoder and wrong(kernels) == ["decoder"]


class Forgetful(TwinDecoder):
    """Computes right logits, but does not keep the new states of layers with the delta rule."""

    def __call__(
        self,
        residual: Tensor,
        rotation: Rotation,
        caches: list[Tensor],
        metas: Sequence[AttentionMetadata],
        logit_rows: Tensor | None,
        states: DeltaStates | None,
    ) -> Tensor:
        if states is not None:
            states = replace(states, layers=[(inputs.clone(), own.clone()) for inputs, own in states.layers])
        return super().__call__(residual, rotation, caches, metas, logit_rows, states)


def test_a_decoder_that_does_not_keep_the_states_of_a_hybrid_is_found() -> None:
    mixers = MixerShapes(num_key_heads=2, num_heads=4, key_size=16, value_size=16, taps=4)
    shapes = replace(SHAPES, dtype=torch.bfloat16, cache_dtype=torch.bfloat16)
    candidates = KernelCandidates(decoders=(KernelCandidate("fake", lambda: Forgetful),))
    assert prove_kernels(candidates, shapes, CPU, folder=None).has_decoder
    kernels = prove_kernels(candidates, replace(shapes, mixers=mixers), CPU, folder=None)
    assert not kernels.has_decoder and wrong(kernels) == ["decoder"]


def test_the_package_of_intel_is_a_candidate_for_norms_and_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    class Operations:
        @staticmethod
        def rms_norm(result: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
            result.copy_(twin_module.rms_norm(x, weight, eps))

        @staticmethod
        def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
            x.copy_(twin_module.rms_norm(x.clone(), weight, eps, residual=residual))

        @staticmethod
        def silu_and_mul(result: Tensor, x: Tensor) -> None:
            result.copy_(twin_module.silu_mul(x))

    monkeypatch.setattr(torch.ops, "_C", Operations(), raising=False)
    package = PackageLayers(lambda name: None)
    only = frozenset({"norm", "gate"})
    candidates = KernelCandidates(
        layers=(
            KernelCandidate("own", lambda: cast(LayerKernels, WrongNorm())),
            KernelCandidate("package", lambda: cast(LayerKernels, package), only),
            KernelCandidate("absent", lambda: cast(LayerKernels, PackageLayers()), only),
        )
    )
    kernels = prove_kernels(candidates, SHAPES, CPU, folder=None)
    assert isinstance(kernels.layers, ComposedLayers)
    assert kernels.layers.norms is cast(LayerKernels, package)
    errors = {verdict.error for verdict in kernels.verdicts if verdict.candidate == "absent"}
    assert len(errors) == 1 and "ModuleNotFoundError" in errors.pop()


def test_a_verdict_says_what_is_wrong() -> None:
    verdict = KernelVerdict("norm", "hidden size 64", "C++", is_right=False, difference=0.25)
    assert verdict.describe() == "its largest difference from plain torch is 25.00%"


def test_the_candidates_of_a_cpu_with_the_instructions_include_the_call_for_all_layers() -> None:
    found = kernel_candidates(CPU, torch.bfloat16)
    made = [one.make() for one in found.decoders]
    assert all(isinstance(one, PackedDecoder) for one in made)
    assert not kernel_candidates(CPU, torch.float32).decoders

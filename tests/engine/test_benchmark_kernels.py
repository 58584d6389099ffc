"""The totals of `baton-bench kernels` over the kernels of a step, and what `baton-bench family-kernels` compares."""

import pytest
import torch

from baton_serve.bench.micro import family_kernels
from baton_serve.bench.micro.device_speeds import DeviceSpeeds
from baton_serve.bench.micro.kernels import KernelSpan, Total, tally
from baton_serve.engine.kernels.reference import mixers as twins
from baton_serve.engine.kernels.triton import mixers as triton_mixers


def test_kernels_count_for_what_they_take_and_what_the_device_waits_before_them() -> None:
    spans = [
        KernelSpan("b", 13.0, 15.0),
        KernelSpan("a", 0.0, 10.0),
        KernelSpan("a", 16.0, 20.0),
        KernelSpan("b", 20.0, 21.0),
    ]
    assert tally(spans, steps=2) == [Total("a", 1.0, 7.0, 0.5), Total("b", 1.0, 1.5, 1.5)]


def test_the_device_does_not_wait_where_kernels_overlap() -> None:
    spans = [
        KernelSpan("long", 0.0, 10.0),
        KernelSpan("short", 2.0, 3.0),
        KernelSpan("next", 9.0, 12.0),
        KernelSpan("last", 13.0, 14.0),
    ]
    assert {total.name: total.idle_us for total in tally(spans, steps=1)} == {
        "long": 0.0,
        "short": 0.0,
        "next": 0.0,
        "last": 1.0,
    }


@pytest.fixture
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the benchmark make its cases of few heads on the CPU. The interpreter multiplies float16, not bfloat16."""
    monkeypatch.setattr(family_kernels, "accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(family_kernels, "random", lambda *shape: torch.randn(shape, dtype=torch.float16))
    monkeypatch.setattr(family_kernels, "DELTA_HEADS", 2)


@pytest.mark.parametrize(("num_seqs", "length", "is_steep"), [(2, 70, False), (2, 70, True), (3, 1, False)])
def test_cases_of_the_delta_rule_are_what_the_kernels_and_their_twins_compute(
    num_seqs: int, length: int, is_steep: bool, small_shapes: None
) -> None:
    heads, states, sequences = family_kernels.delta_case(num_seqs, length, is_steep=is_steep)
    stored = [states.clone(), states.clone()]
    ours = triton_mixers.channel_delta_rule(heads, stored[0], sequences)
    theirs = twins.channel_delta_rule(heads, stored[1], sequences)
    assert ours.shape == (num_seqs * length, 2, 128)
    torch.testing.assert_close(ours, theirs, atol=0.01, rtol=0.01)
    torch.testing.assert_close(stored[0], stored[1], atol=0.01, rtol=0.01)
    assert not torch.equal(stored[0], states)


def test_a_limit_is_the_longer_time_of_bytes_and_operations() -> None:
    speed = DeviceSpeeds(read=4e12, product=8e14)
    assert speed.limit_us(4e9, 1.0) == (1000.0, "bytes")
    assert speed.limit_us(1.0, 8e11) == (1000.0, "operations")
    num_bytes, operations = family_kernels.delta_work(1, 1)
    assert (num_bytes, operations) == (32 * (2 * 4 * 128**2 + 3 * 128 * 2 + 128 * 4 + 2 + 128 * 2), 32 * 6 * 128**2)

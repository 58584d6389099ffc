"""The totals of `baton-bench kernels` over the kernels of a step."""

from baton_serve.bench.micro.kernels import KernelSpan, Total, tally


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

"""The ratios in the output of `baton-bench pd-cpu`, and the setups that it starts."""

from baton_serve.bench.serving.pd_cpu import CpuSetup, Values, parser, rows, setups


def test_each_unified_setup_stands_beside_the_one_apart() -> None:
    apart = CpuSetup("1P1D", (), True)
    small, large = CpuSetup("unified, chunk 128", (), False), CpuSetup("unified, chunk 512", (), False)
    found = [
        (apart, [Values(90, 0.05, 0.04, 1.0), Values(110, 0.02, 0.03, 1.0), Values(95, 0.03, 0.03, 1.0)]),
        (small, [Values(80, 0.09, 0.05, 2.0)]),
        (large, [Values(100, 0.3, 0.05, 1.0)]),
    ]
    reported = {(row.case, row.peer): row.ratio for row in rows(found) if row.peer}
    assert reported[("1P1D: throughput", "unified, chunk 512")] == 0.95
    assert reported[("1P1D: p99 ITL", "unified, chunk 512")] == 10.0
    assert round(reported[("1P1D: p99 ITL", "unified, chunk 128")] or 0, 6) == 3.0


def test_both_layouts_get_the_shared_flags_and_one_alone_its_own() -> None:
    options = parser().parse_args(["/m", "--chunks", "256", "--pd-args", "--x 1"])
    apart, unified = setups(options)
    assert apart.is_apart and apart.flags[-2:] == ("--x", "1")
    assert unified.flags[-2:] == ("--max-num-batched-tokens", "256") and "--unified" in unified.flags

from baton_serve.bench.serving.load_client import RequestOutcome
from baton_serve.bench.serving.long_prompt import StreamGaps, gaps_within, rows


def test_only_the_gaps_beside_the_prompt_count() -> None:
    # Tokens at 11, 12, 14 and 17 s.
    stream = RequestOutcome(started_s=10.0, ttft_s=1.0, itls_s=[1.0, 2.0, 3.0])
    assert gaps_within(stream, 13.0, 15.0) == [2.0]
    assert gaps_within(stream, 0.0, 99.0) == [1.0, 2.0, 3.0]


def test_the_target_is_a_gap_a_fifth_longer() -> None:
    found = list(rows("1P1D", StreamGaps([0.010] * 9, [0.011] * 9, 30.0)))
    assert found[1].case == "1P1D: p99 gap beside the prompt"
    assert found[1].ratio is not None and abs(found[1].ratio - 12 / 11) < 1e-9

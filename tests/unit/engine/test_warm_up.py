"""How long a start measures."""

from baton_serve.engine.step.warm_up import should_measure_long_prompt


def test_only_an_engine_that_is_fast_reads_a_long_prompt_before_it_serves() -> None:
    assert should_measure_long_prompt(5000.0)
    assert not should_measure_long_prompt(200.0)
    assert not should_measure_long_prompt(0.0)

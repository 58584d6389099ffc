"""How long a start measures."""

from baton_serve.engine.step.warm_up import is_worth_more


def test_only_an_engine_that_is_fast_reads_a_long_prompt_before_it_serves() -> None:
    assert is_worth_more(5000.0)
    assert not is_worth_more(200.0)
    assert not is_worth_more(0.0)

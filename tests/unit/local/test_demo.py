"""The requests of the demo, and its display of where the time went."""

from random import Random

from baton_serve.services.local.demo import make_demo_prompt, time_split_text
from baton_serve.services.local.demo_client import DemoUsage, TimeSplit


def test_every_fact_of_a_passage_is_stated_once_and_asked_for_by_name() -> None:
    passage = make_demo_prompt(Random(1))
    assert len({fact.thing for fact in passage.facts}) == len(passage.facts)
    for fact in passage.facts:
        assert passage.text.count(fact.code) == 1 and fact.thing in passage.text
        assert fact.question == f"What is the code of the {fact.thing}?"
    assert make_demo_prompt(Random(2)).text != passage.text


def test_the_split_of_a_handoff_names_its_transport_and_the_part_after_prefill() -> None:
    split = TimeSplit(
        decision="disaggregated",
        cached_tokens={"device": 16},
        ttft_s=0.5,
        queue_s=0.001,
        prefill_s=0.4,
        decode_s=0.2,
        handoff_s=0.41,
        handoff_exposed_s=0.01,
        transport="usm",
        transferred_blocks=60,
        transferred_bytes=4_000_000,
        reused_blocks=1,
    )
    text = time_split_text(split, DemoUsage(970, 11))
    for part in (
        "970 tokens, 16 of them cached",
        "410.0 ms over usm",
        "60 KV blocks, 4.0 MB; 1 more were",
        "remainder    10.0 ms of the handoff took place after prefill",
        "50 tok/s",
    ):
        assert part in text, text


def test_without_a_handoff_it_says_why() -> None:
    text = time_split_text(TimeSplit(decision="decode_only", ttft_s=0.1), DemoUsage(9, 1))
    assert "handoff      none: the prompt is short" in text and "remainder" not in text

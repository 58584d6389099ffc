"""docs/reference/sizing.md shows what its formulas give."""

import re
from pathlib import Path

import pytest

from baton_serve.bench.cards import CARDS, MODELS, GpuSpec, batch_size, kv_tokens, step_s
from tests.helm.chart import CHART, ROOT, Manifest, values_of
from tools.sizing import EXAMPLE, one_card_table, pool_table

PAGE = (ROOT / "docs" / "reference" / "sizing.md").read_text()


def test_the_tables_are_those_of_the_formulas() -> None:
    assert one_card_table() in PAGE
    assert pool_table() in PAGE


@pytest.mark.parametrize("card", CARDS, ids=lambda card: str(card.name))
def test_a_batch_fits_the_cache_and_keeps_the_pace(card: GpuSpec) -> None:
    for model in MODELS:
        batch = batch_size(card, model, EXAMPLE)
        context = EXAMPLE.prompt_tokens + EXAMPLE.answer_tokens
        if batch:
            assert batch * context <= kv_tokens(card, model)
            assert step_s(card, model, batch, context) <= EXAMPLE.inter_token_s


CONTEXT = {"Qwen3-4B": 40960, "Qwen3-8B": 40960}
"""`max_position_embeddings` of the models that examples name: an instance needs KV memory for one full context."""
EXAMPLES = [
    path
    for path in [*(CHART / "ci").glob("*.yaml"), *(ROOT / "examples").glob("*.yaml")]
    if "# card:" in path.read_text()
]


def fits(card_name: str, values: Manifest) -> bool:
    """Return whether the model of the values fits the card in 16 bit, with the KV of one full context."""
    source = {**values_of(CHART / "values.yaml")["model"]["source"], **values.get("model", {}).get("source", {})}
    name = source["pvc"]["subPath"] if source["kind"] == "pvc" else source["download"]["repository"].split("/")[-1]
    (card,) = [one for one in CARDS if one.name == card_name]
    (model,) = [one for one in MODELS if one.name.lower() == name.lower()]
    context: int = values.get("engine", {}).get("maxModelLen", CONTEXT[model.name])
    return kv_tokens(card, model) >= context


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.stem))
def test_the_model_of_an_example_fits_the_card_that_it_names(path: Path) -> None:
    (card,) = re.findall(r"^# card: (.+)$", path.read_text(), re.MULTILINE)
    assert fits(card, values_of(path))


def test_every_example_for_arc_names_its_card() -> None:
    assert {path.stem for path in EXAMPLES} >= {"a770-i915", "arc-dra", "arc-xe", "two-arc-nodes"}


def test_the_default_model_fits_a_card_of_16_gb_and_8b_in_16_bit_does_not() -> None:
    assert fits("A770 16 GB", {})
    wrong = {"model": {"source": {"download": {"repository": "Qwen/Qwen3-8B"}}}, "engine": {"maxModelLen": 1}}
    assert not fits("A770 16 GB", wrong)

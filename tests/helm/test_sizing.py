"""docs/reference/sizing.md shows what its formulas give."""

import pytest

from baton_serve.bench.cards import CARDS, MODELS, GpuSpec, batch_size, kv_tokens, step_s
from tests.helm.chart import ROOT
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

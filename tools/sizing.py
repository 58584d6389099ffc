#!/usr/bin/env python3
"""Print the tables of docs/reference/sizing.md and docs/quickstart/arc.md from the formulas in `bench/cards.py`; tests
compare them.

`PYTHONPATH=. python tools/sizing.py` prints them.
"""

from math import ceil

from baton_serve.bench.cards import (
    CARDS,
    MODELS,
    WEIGHT_BITS,
    GpuSpec,
    ModelSpec,
    TargetLoad,
    batch_size,
    kv_tokens,
    num_decode,
    num_prefill,
    prefill_tokens_per_s,
    step_s,
)

EXAMPLE = TargetLoad(requests_per_s=2.0, prompt_tokens=2000, answer_tokens=300, inter_token_s=0.1)


def _short(card: GpuSpec) -> str:
    """Return the card's name without its memory, which the page names once."""
    return card.name.split(" ")[0]


def one_card_table() -> str:
    rows = [
        "|card|model|prefill tok/s|KV tokens|step, 1 sequence|KV made by prefill|",
        "|---|---|---|---|---|---|",
    ]
    for card in CARDS:
        for model in MODELS:
            tokens = kv_tokens(card, model)
            if not tokens:
                continue
            rate = prefill_tokens_per_s(card, model)
            step = step_s(card, model, 1, EXAMPLE.prompt_tokens) * 1e3
            made = rate * model.kv_bytes_per_token / 1e9
            rows.append(f"|{_short(card)}|{model.name}|{rate:,.0f}|{tokens:,}|{step:.0f} ms|{made:.2f} GB/s|")
    return "\n".join(rows)


def pool_table(load: TargetLoad = EXAMPLE) -> str:
    rows = ["|card|model|prefill instances|decode instances|sequences per decode|", "|---|---|---|---|---|"]
    for card in CARDS:
        for model in MODELS:
            batch = batch_size(card, model, load) if kv_tokens(card, model) else 0
            if not batch:
                continue
            prefill, decode = num_prefill(card, model, load), num_decode(card, model, load)
            counts = f"{ceil(prefill)} ({prefill:.2f})|{ceil(decode)} ({decode:.2f})"
            rows.append(f"|{_short(card)}|{model.name}|{counts}|{batch}|")
    return "\n".join(rows)


def fits_table() -> str:
    """Return the table of KV tokens, in thousands, that fit beside the weights in each number of bits."""
    rows = [f"|Card|{'|'.join(model.name for model in MODELS)}|", "|---" * (len(MODELS) + 1) + "|"]
    rows += [f"|{card.name}|{'|'.join(_fits(card, model) for model in MODELS)}|" for card in CARDS]
    return "\n".join(rows)


def _fits(card: GpuSpec, model: ModelSpec) -> str:
    counts = [kv_tokens(card, model, bits) for bits in WEIGHT_BITS.values()]
    return "/".join(str(count // 1000) for count in counts)


if __name__ == "__main__":
    print(one_card_table(), pool_table(), fits_table(), sep="\n\n")

"""The chats of `baton-bench encode-pool`, the files of its model, and the ratios in its output."""

import json
from pathlib import Path

from tokenizers import Tokenizer

from baton_serve.bench.serving.encode_pool import APART, UNIFIED, ImageLoad, chats, parser, rows
from baton_serve.bench.serving.load_client import RequestOutcome
from baton_serve.bench.serving.servable_shape import write_servable_images, write_servable_shape
from baton_serve.bench.serving.serve_report import ServeMeasures, measure


def measured(*, ttft_s: float, gap_s: float, duration_s: float) -> ServeMeasures:
    gaps = [gap_s] * 3
    one = RequestOutcome(ttft_s=ttft_s, latency_s=ttft_s + sum(gaps), itls_s=gaps, prompt_tokens=9, output_tokens=4)
    return measure([one, one], duration_s, metrics=("ttft", "tpot", "itl"), percentiles=(50.0, 99.0))


def test_a_ratio_above_one_means_that_the_encode_pool_is_better() -> None:
    load = ImageLoad(2.0, [])
    unified = measured(ttft_s=0.9, gap_s=0.010, duration_s=1.0)
    apart = measured(ttft_s=0.6, gap_s=0.020, duration_s=2.0)
    found = {row.case: row for row in rows([(UNIFIED, load, unified), (APART, load, apart)])}
    ratios = {name: found[f"{APART}, 2/s: {name}"].ratio for name in ("p50 TTFT", "p99 ITL", "requests")}
    assert {name: round(ratio or 0.0, 6) for name, ratio in ratios.items()} == {
        "p50 TTFT": 1.5,
        "p99 ITL": 0.5,
        "requests": 0.5,
    }
    assert found[f"{APART}, 2/s: p50 TTFT"].peer_value == 900.0
    assert found[f"{UNIFIED}, 2/s: p50 TTFT"].ratio is None
    alone = {row.case: row for row in rows([(APART, load, apart)])}
    assert alone[f"{APART}, 2/s: p50 TTFT"].peer is None


def test_chats_are_the_same_for_a_seed_and_share_no_image(tmp_path: Path) -> None:
    folder = write_servable_images(tmp_path, is_small=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    options = parser().parse_args(["--images", "2", "--image-size", "56", "--text-tokens", "20", "--output", "8"])
    first, again, other = (chats(options, tokenizer, count=3, rate=2.0, seed=seed) for seed in (3, 3, 4))
    assert (first, first.name) == (again, "2/s")
    assert chats(options, tokenizer, count=3, rate=float("inf"), seed=3).name == "3 at once"
    images = [image for load in (first, other) for request in load.requests for image in request.images]
    assert len(set(images)) == len(images) == 12
    assert all(len(tokenizer.encode(str(request.prompt)).ids) == 20 for request in first.requests)


def test_special_tokens_have_the_ids_of_the_config(tmp_path: Path) -> None:
    folder = write_servable_images(tmp_path / "images", is_small=True)
    config = json.loads((folder / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "a<|vision_start|><|image_pad|><|vision_end|><|end|>"
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
    assert tokenizer.encode(text).ids[1:] == [*(config[name] for name in names), config["text_config"]["eos_token_id"]]
    size = tokenizer.get_vocab_size()
    assert size == config["text_config"]["vocab_size"]
    assert all(tokenizer.decode([number]) for number in range(258, 310))
    plain = write_servable_shape("qwen3-4b", tmp_path / "plain")
    assert Tokenizer.from_file(str(plain / "tokenizer.json")).token_to_id("<|end|>") == 151935

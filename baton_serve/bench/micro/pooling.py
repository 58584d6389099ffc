"""Measure embeddings without a server: texts of mixed lengths through the engine, and through Sentence Transformers.

The limit is the same model with the same number of tokens in full batches of one length: without padding and
scheduling.
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from baton_serve.bench.report import Row, show
from baton_serve.contracts.identity import RequestId
from baton_serve.contracts.pooling import PoolingInput, PoolingSpec
from baton_serve.engine import EngineConfig
from baton_serve.engine.pooling.engine import PoolingEngine

EMBED = PoolingSpec(task="embed")


def run(arguments: Sequence[str]) -> None:
    """Run `baton-bench pooling` with these arguments."""
    parser = argparse.ArgumentParser(prog="baton-bench pooling", description=__doc__)
    parser.add_argument("--model", required=True, help="folder of an embedding model")
    parser.add_argument("--device", default="auto", help="device of the engine")
    parser.add_argument("--texts", type=int, default=512, help="number of texts")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs=2,
        default=(8, 200),
        help="shortest and longest text in tokens; lengths are evenly distributed",
    )
    parser.add_argument("--repeats", type=int, default=3, help="repetitions of each case")
    parser.add_argument("--peer", action="store_true", help="also measure Sentence Transformers")
    parser.add_argument("--json", action="store_true", help="print one JSON object per row")
    given = parser.parse_args(list(arguments))
    engine = PoolingEngine(EngineConfig(model=given.model, device=given.device), "embed")
    draw = random.Random(0)
    low, high = given.lengths
    # IDs from the middle of the vocabulary are whole words in most tokenizers.
    lengths = [draw.randint(low, high) for _ in range(given.texts)]
    inputs = [[draw.randrange(engine.vocab_size // 4, engine.vocab_size // 2) for _ in range(n)] for n in lengths]
    num_tokens = sum(lengths)
    equal = max(1, num_tokens // len(lengths))
    same = [[token % engine.vocab_size for token in range(1000, 1000 + equal)]] * len(lengths)
    limit = num_tokens / best(lambda: compute(engine, same), given.repeats) * (equal * len(same) / num_tokens)
    peer = peer_tokens_per_s(given.model, engine, inputs, given.repeats) if given.peer else None
    rows = []
    for case, parts in (("one request", [inputs]), ("a request a text", [[ids] for ids in inputs])):
        speed = num_tokens / best(lambda parts=parts: compute(engine, *parts), given.repeats)  # type: ignore[misc]
        name = "Sentence Transformers" if peer is not None else None
        rows.append(Row("pooling", case, speed, "tok/s", limit, speed / limit, name, peer))
    show(rows, as_json=given.json)


def compute(engine: PoolingEngine, *requests: Sequence[list[int]]) -> None:
    """Compute the embeddings of all requests."""
    for number, inputs in enumerate(requests):
        engine.pool(RequestId(str(number)), [PoolingInput(ids) for ids in inputs], EMBED)
    while engine.has_work():
        engine.step()


def peer_tokens_per_s(model: str, engine: PoolingEngine, inputs: Sequence[list[int]], repeats: int) -> float:
    """Return the peer's tokens per second. `encode` sorts by length and pads batches of 32. It takes texts, so the
    time for tokenization is subtracted."""
    from sentence_transformers import SentenceTransformer

    peer = SentenceTransformer(model, device=engine.device.type)
    texts = [peer.tokenizer.decode(ids) for ids in inputs]
    num_tokens = sum(
        len(ids) for ids in peer.tokenizer(texts, truncation=True, max_length=peer.max_seq_length)["input_ids"]
    )
    tokenizing = best(lambda: peer.tokenizer(texts), repeats)
    encoding = best(lambda: np.asarray(peer.encode(texts)), repeats)
    return num_tokens / max(encoding - tokenizing, 1e-9)


def best(work: Callable[[], object], repeats: int) -> float:
    """Return the seconds of the fastest run."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        with torch.inference_mode():
            work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)

"""Measure grammars that constrain tokens, with llguidance (Baton's library) and xgrammar: compilation, and masks.

    python -m baton_serve.bench.micro.grammar --model FOLDER [--peer xgrammar] [--engine] [--json]

The vocabulary is the folder's. Each case follows one valid text token by token, as a request does. With `--engine` the
folder's model generates a batch with and without grammars: the difference is what masks cost beside the device's work.
"""

import argparse
import importlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal, Protocol

from tokenizers import Tokenizer

from baton_serve.bench.report import Row, show
from baton_serve.contracts.identity import BlockHash, RequestId
from baton_serve.contracts.lark import WHITESPACE
from baton_serve.contracts.messages import Work
from baton_serve.contracts.sampling import SamplingSpec
from baton_serve.engine import Engine, EngineConfig
from baton_serve.services.router.text.tokenization import TextTokenizer

DEFAULT_MODEL = Path(__file__).parents[2] / "services/local/demo_model"
REPEATS = 5
"""Repetitions of each measurement."""
ANSWER_TOKENS = 120
"""Tokens of each answer with `--engine`."""


@dataclass(frozen=True, slots=True)
class GrammarCase:
    """A grammar, a JSON schema or a regular expression by `kind`, and a text that matches it."""

    name: str
    kind: str
    grammar: str
    text: str


class Library(Protocol):
    """A grammar library under test."""

    def compile(self, case: GrammarCase) -> object: ...

    def matcher(self, compiled: object) -> tuple[Callable[[], None], Callable[[int], bool]]:
        """Return two functions for one answer: one computes the mask of the next token, the other accepts a token."""
        ...


class LLGuidance:
    """llguidance, used as by the engine."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        import llguidance
        import numpy as np

        self._library = llguidance.LLMatcher
        eos = tokenizer.backend.token_to_id(tokenizer.special_tokens["eos_token"])
        self._tokenizer = llguidance.LLTokenizer(tokenizer.backend.to_str(), eos_token=eos)
        self._mask = np.zeros((self._tokenizer.vocab_size + 31) // 32, dtype=np.int32)

    def compile(self, case: GrammarCase) -> object:
        if case.kind == "json":
            grammar = self._library.grammar_from_json_schema(case.grammar)
        else:
            grammar = self._library.grammar_from_regex(case.grammar)
        return self._library(self._tokenizer, grammar, log_level=0)

    def matcher(self, compiled: Any) -> tuple[Callable[[], None], Callable[[int], bool]]:
        copy, address, size = compiled.deep_copy(), self._mask.ctypes.data, self._mask.nbytes
        return lambda: copy.unsafe_compute_mask_ptr(address, size), copy.consume_token


class XGrammar:
    """xgrammar with one thread and without its cache."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._library: Any = importlib.import_module("xgrammar")
        backend = tokenizer.backend
        vocab = sorted(backend.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
        eos = backend.token_to_id(tokenizer.special_tokens["eos_token"])
        info = self._library.TokenizerInfo(
            [token for token, _ in vocab], self._library.VocabType.BYTE_LEVEL, stop_token_ids=[eos]
        )
        self._compiler = self._library.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._mask = self._library.allocate_token_bitmask(1, info.vocab_size)

    def compile(self, case: GrammarCase) -> object:
        make = {"json": self._compiler.compile_json_schema, "regex": self._compiler.compile_regex}[case.kind]
        return make(case.grammar)

    def matcher(self, compiled: object) -> tuple[Callable[[], None], Callable[[int], bool]]:
        matcher = self._library.GrammarMatcher(compiled)
        return lambda: matcher.fill_next_token_bitmask(self._mask), matcher.accept_token


LIBRARIES: dict[str, Callable[[TextTokenizer], Library]] = {"llguidance": LLGuidance, "xgrammar": XGrammar}


def cases() -> list[GrammarCase]:
    """Return grammars from trivial to large, each with a matching text."""
    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 60},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "email": {"type": "string", "pattern": "^[a-z.]+@[a-z]+\\.(com|org)$"},
            "kind": {"enum": ["admin", "user", "guest"]},
        },
        "required": ["name", "age", "email", "kind"],
        "additionalProperties": False,
    }
    team = {
        "$defs": {"person": person},
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "people": {"type": "array", "items": {"$ref": "#/$defs/person"}, "minItems": 1},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 50},
            "leader": {"anyOf": [{"$ref": "#/$defs/person"}, {"type": "null"}]},
        },
        "required": ["title", "people", "leader"],
        "additionalProperties": False,
    }
    wide = {
        "type": "object",
        "properties": {f"field_{i}": {"type": ["string", "number", "null"]} for i in range(120)},
        "required": [f"field_{i}" for i in range(120)],
        "additionalProperties": False,
    }
    one = {"name": "Zoë van der Berg", "age": 41, "email": "zoe.berg@example.org", "kind": "user"}
    whole = {"title": "Quarterly plan: “north”", "people": [one] * 4, "tags": ["a", "planning 2025"], "leader": None}
    values = {f"field_{i}": [None, i * 1.5, f"value number {i}"][i % 3] for i in range(120)}
    words = [f"option-{i:04d}-{i * 7919 % 1000}" for i in range(500)]
    return [
        GrammarCase("any object", "json", '{"type": "object"}', json.dumps(whole, ensure_ascii=False)),
        GrammarCase("flat object", "json", json.dumps(person), json.dumps(one, ensure_ascii=False)),
        GrammarCase("nested, references", "json", json.dumps(team), json.dumps(whole, ensure_ascii=False)),
        GrammarCase("120 fields", "json", json.dumps(wide), json.dumps(values)),
        GrammarCase("choice of 500", "regex", "|".join(words), words[321]),
        GrammarCase(
            "date and time",
            "regex",
            r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)",
            "2025-11-20T16:30:00.125Z",
        ),
        GrammarCase("prose of 600", "regex", r"[A-Z][a-z ,]{20,600}\.", "The " + "quick brown fox, " * 16 + "done."),
    ]


def measure(name: str, tokenizer: TextTokenizer) -> list[Row]:
    """Return the rows of one library."""
    started = time.perf_counter()
    library = LIBRARIES[name](tokenizer)
    rows = [Row(name, "tokenizer ready", (time.perf_counter() - started) * 1e3, "ms")]
    for case in cases():
        rows += _measure_case(name, library, tokenizer.backend, case)
    return rows


def _measure_case(name: str, library: Library, tokenizer: Tokenizer, case: GrammarCase) -> list[Row]:
    token_ids = tokenizer.encode(case.text, add_special_tokens=False).ids
    compiles: list[float] = []
    masks: list[float] = []
    takes: list[float] = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        compiled = library.compile(case)
        compiles.append(time.perf_counter() - started)
        fill, take = library.matcher(compiled)
        for token_id in token_ids:
            started = time.perf_counter()
            fill()
            filled = time.perf_counter()
            if not take(token_id):
                raise SystemExit(
                    f"{name}: {case.name}: token {tokenizer.id_to_token(token_id)!r} does not match the grammar"
                )
            masks.append(filled - started)
            takes.append(time.perf_counter() - filled)
    return [
        Row(name, f"{case.name}: compile", median(compiles) * 1e3, "ms"),
        Row(name, f"{case.name}: mask, median of {len(token_ids)} tokens", median(masks) * 1e6, "µs"),
        Row(name, f"{case.name}: mask, 99 of 100", quantiles(masks, n=100)[98] * 1e6, "µs"),
        Row(name, f"{case.name}: mask, longest", max(masks) * 1e6, "µs"),
        Row(name, f"{case.name}: take a token", median(takes) * 1e6, "µs"),
    ]


def measure_engine(folder: Path, device: Literal["auto", "cpu", "cuda", "xpu"], batch: int) -> list[Row]:
    """Return tokens per second of a whole batch, free and under grammars, alternately; the best of `REPEATS` each."""
    people = {"type": "array", "minItems": 5000, "items": json.loads(cases()[1].grammar)}
    people["x-guidance"] = {"whitespace_pattern": WHITESPACE}
    grammars = {
        "free": None,
        "words": "start: /([a-z]+ )+/",
        "JSON": json.dumps({"grammars": [{"json_schema": people}]}),
    }
    best = dict.fromkeys(grammars, 0.0)
    with Engine(EngineConfig(model=str(folder), device=device, max_num_seqs=batch)) as engine:
        for attempt in range(REPEATS):
            for name, grammar in grammars.items():
                best[name] = max(best[name], _tokens_per_s(engine, f"{name} {attempt}", grammar, batch))
    return [
        Row("engine", f"batch of {batch}: {name}", value, "tokens/s", limit=best["free"], ratio=value / best["free"])
        for name, value in best.items()
    ]


def _tokens_per_s(engine: Engine, name: str, grammar: str | None, batch: int) -> float:
    for number in range(batch):
        sampling = SamplingSpec(seed=0, max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True, grammar=grammar)
        prompt = [(7 * number + i) % 1000 for i in range(32)]
        work = Work(
            request_id=RequestId(f"{name} {number}"),
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=sampling,
            root=BlockHash(bytes(16)),
        )
        engine.add(work)
    generated = 0
    while generated < 2 * batch:  # leave out prefill and the compilation of the grammar
        generated += len(engine.step().tokens)
    started, before = time.perf_counter(), generated
    while engine.has_work():
        generated += len(engine.step().tokens)
    return (generated - before) / (time.perf_counter() - started)


def run(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="baton-bench grammar", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="folder with tokenizer.json")
    parser.add_argument("--peer", choices=["xgrammar"], help="also measure this library, which must be installed")
    parser.add_argument("--json", action="store_true", help="print one JSON object per row")
    parser.add_argument("--engine", action="store_true", help="measure a batch of the model with and without grammars")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "xpu"], default="auto", help="device for --engine")
    parser.add_argument("--batch", type=int, default=16, help="batch size for --engine")
    options = parser.parse_args(arguments)
    if options.engine:
        show(measure_engine(options.model, options.device, options.batch), as_json=options.json)
        return
    tokenizer = TextTokenizer.from_folder(options.model)
    names = ["llguidance", *([options.peer] if options.peer else [])]
    show([row for name in names for row in measure(name, tokenizer)], as_json=options.json)


if __name__ == "__main__":
    import sys

    run(sys.argv[1:])

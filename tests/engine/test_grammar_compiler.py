"""A worker's grammars: what a router should not have sent is refused, and the largest that it may send is compiled."""

import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from baton_serve.engine.errors import RequestError
from baton_serve.engine.sample import grammar as grammar_module
from baton_serve.engine.sample.constraints import ConstraintBuilder
from baton_serve.engine.sample.grammar import Grammars
from baton_serve.engine.sample.grammar_compiler import Compiled
from baton_serve.engine.sample.token_masks import TokenMasker
from tests import grammar_bombs as bombs
from tests.families import EOS_ID
from tests.unit.router.tokenizers_for_tests import write_folder

ROOT = Path(__file__).resolve().parents[2]
GOOD = 'start: "a" | "b"'


def grammars(folder: Path) -> Grammars:
    return Grammars(write_folder(folder / "model"), vocab_size=300, eos_token_ids=frozenset({EOS_ID}))


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (bombs.lark_of(bombs.references(3_000)), r"\$ref targets"),
        (bombs.rules(6_000), "rules or more"),
        (bombs.lark_of(bombs.deep(100)), "nested"),
        (bombs.lark_of(bombs.properties(10_000)), "10000 properties"),
        ("start: nothing", "nothing"),
    ],
    ids=["references", "rules", "deep", "properties", "wrong"],
)
def test_a_grammar_that_no_router_should_send_fails_its_request_alone(
    tmp_path: Path, grammar: str, reason: str
) -> None:
    known = grammars(tmp_path)
    known.prepare(grammar)
    for _ in range(2):
        with pytest.raises(RequestError, match=reason):
            known.start(grammar)
    assert not known.start(GOOD).matcher.is_error()
    known.close()


def test_a_grammar_that_a_request_holds_is_not_compiled_again_after_many_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "MAX_CACHED_GRAMMARS", 2)
    known = grammars(tmp_path)
    masker = TokenMasker(ConstraintBuilder(known, vocab_size=300), torch.device("cpu"))
    compiled: list[str] = []
    compile_grammar = known._compiler.compile

    def counted(text: str) -> "Future[Compiled]":
        compiled.append(text)
        return compile_grammar(text)

    monkeypatch.setattr(known._compiler, "compile", counted)

    def prepare(*texts: str) -> object:
        """Return what the owner of a request with the last grammar holds."""
        for text in texts:
            held = masker.prepare(text).result()
        return held

    others = [f'start: "{letter}"' for letter in "cdefg"]
    held = prepare(GOOD)
    prepare(*others)
    prepare(GOOD)
    assert compiled.count(GOOD) == 1, "the step of the request that holds it would wait for a second compilation"
    del held
    prepare(*others)
    prepare(GOOD)
    assert compiled.count(GOOD) == 2, "a grammar that nobody holds is dropped"
    masker.close()


def test_a_failed_grammar_can_be_compiled_again_in_a_full_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "MAX_CACHED_GRAMMARS", 1)
    known = grammars(tmp_path)
    with pytest.raises(RequestError):
        known.prepare("start: nothing").result()
    monkeypatch.setattr(grammar_module, "MAX_CACHED_GRAMMARS", 0)
    with pytest.raises(RequestError):
        known.prepare("start: nothing").result()
    known.close()


def test_the_first_mask_of_a_grammar_is_computed_by_the_compiling_thread(tmp_path: Path) -> None:
    known = grammars(tmp_path)
    # The library spends seconds on this one, nearly all in the first mask.
    hungry = "start: /(a{1000}){1000}/"
    compiled = known.prepare(hungry).result()
    started_at = time.process_time()
    state = known.start(hungry)
    known.allowed([state])
    # A copy has most of the first mask's work behind it.
    assert time.process_time() - started_at < 0.5
    assert not compiled.matcher.is_error()
    known.close()


def test_a_failed_compilation_is_tried_again(tmp_path: Path) -> None:
    known = grammars(tmp_path)
    first = known.prepare("start: nothing")
    with pytest.raises(RequestError):
        first.result()
    assert known.prepare("start: nothing") is not first
    known.close()


def test_the_largest_grammars_within_the_bounds_are_compiled_copied_used_and_freed(tmp_path: Path) -> None:
    """In a process of its own, whose other threads have little stack."""
    code = f"""
import resource, threading
from pathlib import Path
from baton_serve.engine.errors import RequestError
from tests import grammar_bombs as bombs
from tests.engine.test_grammar_compiler import grammars
known = grammars(Path({str(tmp_path)!r}))
known.read()
largest = [bombs.largest_accepted(made) for made in bombs.GRAMMARS.values()]
def use():
    for grammar in largest:
        try:
            state = known.start(grammar)
        except RequestError as exc:
            assert "too deeply nested" in exc.message, exc.message
        else:
            known.allowed([state])
    known._compiled.clear()
threading.stack_size(512 * 1024)
thread = threading.Thread(target=use)
thread.start()
thread.join()
known.close()
print("done")
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr[-2_000:]


def test_what_is_kept_is_bounded_in_bytes_and_what_is_dropped_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton_serve.engine.sample.grammar.CACHED_BYTES", 1_000_000)
    known = grammars(tmp_path)
    texts = [f'start: "{"a" * 400_000}{i}"' for i in range(4)]
    for text in texts:
        known.start(text)
    known.prepare(GOOD)
    assert texts[0] not in known._compiled and len(known._compiled) <= 3
    known.start(texts[0])
    known.close()

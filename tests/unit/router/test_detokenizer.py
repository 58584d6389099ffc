"""Streamed text equals decoding everything at once, for any tokens and any division into updates."""

import sys
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from baton_serve.services.router.text.detokenizer import MAX_HELD_TOKENS, Detokenizer
from baton_serve.services.router.text.stop_strings import StopStrings
from baton_serve.services.router.text.tokenization import TextTokenizer
from tests.unit.router.tokenizers_for_tests import byte_fallback, byte_level, word_piece

BYTE_LEVEL = TextTokenizer(byte_level(), {})
BYTE_FALLBACK = TextTokenizer(byte_fallback(), {})
WORD_PIECE = TextTokenizer(word_piece(), {})
DETOKENIZERS = {id(tokenizer): Detokenizer(tokenizer) for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK, WORD_PIECE)}


def streamed(tokenizer: TextTokenizer, ids: Sequence[int], cut: int, *, skip: bool = True) -> str:
    stream = DETOKENIZERS[id(tokenizer)].stream(skip_special_tokens=skip)
    parts = [stream.push(ids[i : i + cut]) for i in range(0, len(ids), cut)]
    return "".join(parts) + stream.finish()


def ids_of(tokenizer: TextTokenizer, *, least: int = 0) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(least, tokenizer.vocab_size - 1), max_size=24)


CUTS = st.integers(1, 5)


@given(ids_of(BYTE_LEVEL), CUTS, st.booleans())
def test_any_byte_level_tokens(ids: list[int], cut: int, skip: bool) -> None:
    assert streamed(BYTE_LEVEL, ids, cut, skip=skip) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@given(ids_of(WORD_PIECE), CUTS, st.booleans())
def test_any_word_pieces(ids: list[int], cut: int, skip: bool) -> None:
    assert streamed(WORD_PIECE, ids, cut, skip=skip) == WORD_PIECE.decode(ids, skip_special_tokens=skip)


@given(st.text(max_size=20), CUTS, st.booleans())
def test_any_text_through_byte_fallback(text: str, cut: int, skip: bool) -> None:
    ids = BYTE_FALLBACK.encode(text, add_special_tokens=True)
    assert streamed(BYTE_FALLBACK, ids, cut, skip=skip) == BYTE_FALLBACK.decode(ids, skip_special_tokens=skip)


@given(ids_of(BYTE_FALLBACK, least=259), CUTS, st.booleans())
def test_any_pieces_of_a_byte_fallback_vocabulary(ids: list[int], cut: int, skip: bool) -> None:
    assert streamed(BYTE_FALLBACK, ids, cut, skip=skip) == BYTE_FALLBACK.decode(ids, skip_special_tokens=skip)


@given(ids_of(BYTE_FALLBACK), CUTS)
def test_bytes_that_are_no_text_become_one_mark_each_and_harm_nothing_else(ids: list[int], cut: int) -> None:
    once = streamed(BYTE_FALLBACK, ids, len(ids) or 1)
    assert streamed(BYTE_FALLBACK, ids, cut) == once
    # The library drops a whole run of bytes if one is invalid; we keep its readable part.
    library = BYTE_FALLBACK.decode(ids)
    if "\ufffd" not in once:
        assert once == library


def test_an_invalid_byte_after_a_character_does_not_end_the_stream() -> None:
    pieces = ["<0xE2>", "<0x82>", "<0xAC>", "<0xFF>", "▁hello", "▁hello"]
    vocabulary = BYTE_FALLBACK.backend.get_vocab()
    ids = [vocabulary[piece] for piece in pieces]
    assert streamed(BYTE_FALLBACK, ids, 1) == "€\ufffd hello hello"


def test_a_long_run_of_invalid_bytes_is_not_held_back_for_ever() -> None:
    for tokenizer, invalid, letter in ((BYTE_LEVEL, 0xFF, ord("a")), (BYTE_FALLBACK, 3 + 0xFF, 3 + ord("a"))):
        stream = Detokenizer(tokenizer).stream()
        texts = [stream.push([invalid]) for _ in range(2 * MAX_HELD_TOKENS)]
        assert [len(text) for text in texts] == [0] * 63 + [64] + [0] * 63 + [64]
        assert stream.push([letter]) + stream.finish() == "a"


@pytest.mark.parametrize(("make", "uses_table"), [(byte_level, True), (byte_fallback, True), (word_piece, False)])
def test_the_bytes_of_single_tokens_come_from_a_table_where_it_is_known_to_be_exact(
    make: Callable[[], Tokenizer], uses_table: bool
) -> None:
    assert Detokenizer(TextTokenizer(make(), {})).uses_table is uses_table


def test_a_character_of_several_tokens_comes_whole() -> None:
    stream = Detokenizer(BYTE_LEVEL).stream()
    assert [stream.push([value]) for value in "€".encode()] == ["", "", "€"]
    assert stream.push("é".encode()[:1]) == ""
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize("cut", [1, 2, 6])
def test_tokens_outside_of_the_vocabulary_have_no_text_and_harm_no_others(cut: int) -> None:
    unknown = BYTE_LEVEL.vocab_size + 5
    first, second, third = "€".encode()
    assert streamed(BYTE_LEVEL, [ord("a"), unknown, first, second, third, ord("b")], cut) == "a€b"


def test_a_leading_space_goes_once() -> None:
    ids = BYTE_FALLBACK.encode("hello hello", add_special_tokens=False)
    assert not Detokenizer(BYTE_FALLBACK).stream().push(ids[:1]).startswith(" ")
    assert streamed(BYTE_FALLBACK, ids, 1) == "hello hello"
    whole_word = BYTE_FALLBACK.backend.token_to_id("▁hello")
    assert whole_word is not None
    assert Detokenizer(BYTE_FALLBACK).token_text(whole_word) == " hello"


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = BYTE_LEVEL.encode("<|im_start|>hello<|im_end|><tool call>", add_special_tokens=False)
    assert streamed(BYTE_LEVEL, ids, 1) == "hello<tool call>"
    assert streamed(BYTE_LEVEL, ids, 1, skip=False) == "<|im_start|>hello<|im_end|><tool call>"


def test_special_tokens_may_stand_without_spaces() -> None:
    ids = WORD_PIECE.encode("hello[SEP][SEP]", add_special_tokens=False)
    detokenizer = Detokenizer(WORD_PIECE)

    def text(*, spaces: bool) -> str:
        stream = detokenizer.stream(skip_special_tokens=False, spaces_between_special_tokens=spaces)
        return stream.push(ids) + stream.finish()

    assert text(spaces=True) == "hello [SEP] [SEP]"
    assert text(spaces=False) == "hello [SEP][SEP]"


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
    CUTS,
)
def test_stop_strings_cut_at_the_same_place_however_the_text_comes(
    text: str, stops: list[str], include: bool, cut: int
) -> None:
    search = StopStrings(stops, include=include)
    out, matched = "", None
    for i in range(0, len(text), cut):
        found = search.push(text[i : i + cut])
        out += found.text
        if (matched := found.matched) is not None:
            break
    if matched is None:
        assert out + search.finish() == text
        assert not any(stop in text for stop in stops)
        return
    # With a piece longer than one character a later piece may hold several; the first position counts.
    ends = [text.find(stop) for stop in stops if stop in text]
    assert out == (text[: text.find(matched) + len(matched)] if include else text[: text.find(matched)])
    if cut == 1:
        assert text.find(matched) + len(matched) == min(text.find(s) + len(s) for s in stops if s in text)
    assert min(ends) <= text.find(matched)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    search = StopStrings(["END"])
    assert search.push("the E").text == "the "
    assert search.push("agle").text == "Eagle"
    assert search.push(" EN").text == " "
    assert search.finish() == "EN"


@pytest.mark.parametrize(
    "stop", ["b" + "a" * 4094 + "c", "a" * 4095 + "c", "ab" * 2047 + "c", "a" * 2000 + "b" + "a" * 2000]
)
def test_the_search_for_long_stop_strings_takes_a_time_per_character(stop: str) -> None:
    others = [f"{stop[:-1]}{i:x}" for i in range(16)]
    search = StopStrings(others)
    num_calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        # The text matches as far as it can, and then in vain.
        for piece in (stop[:4000], *[stop[4000:4010] or "a"] * 100):
            search.push(piece)
    finally:
        sys.setprofile(None)
    assert num_calls < 10 * 5000 * len(others)


@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3), st.text("abc", max_size=40), st.data())
def test_a_search_in_pieces_finds_what_a_search_in_the_whole_text_finds(
    stops: list[str], text: str, data: st.DataObject
) -> None:
    search = StopStrings(stops)
    out, at = "", 0
    while at < len(text):
        size = data.draw(st.integers(1, 4))
        piece, at = text[at : at + size], at + size
        is_active = data.draw(st.booleans())
        end = min(at, len(text))
        # Occurrences that end in this piece, by their beginning.
        begins = [
            begin
            for stop in stops
            for begin in range(end - len(stop) + 1)
            if text.startswith(stop, begin) and begin + len(stop) > end - len(piece)
        ]
        found = search.push(piece, is_active=is_active)
        out += found.text
        assert (found.matched is not None) == (is_active and bool(begins))
        if found.matched is not None:
            assert out == text[: min(begins)]
            return
        held = max(
            (n for stop in stops for n in range(1, min(len(stop), end + 1)) if text[:end].endswith(stop[:n])), default=0
        )
        assert out == text[: end - held]
    assert out + search.finish() == text


def test_a_stop_string_counts_if_it_ends_after_min_tokens_as_in_vllm() -> None:
    search = StopStrings(["END", "N"])
    assert search.push("END E", is_active=False).text == "END "
    assert search.push("N", is_active=False).text == ""
    found = search.push("D.")
    assert (found.text, found.matched) == ("", "END")
    inside = StopStrings(["END", "N"], include=True)
    assert inside.push("EN", is_active=False).text == ""
    assert inside.push("x").text == "ENx", "the N came within min_tokens"

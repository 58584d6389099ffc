"""The corpus of the demo model: reproducible, exact about tokens, and fair (each question has one findable answer)."""

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import cast

import pytest
from tokenizers import Tokenizer

from tools.demo_model import lookups
from tools.demo_model.arithmetic import sum_turn
from tools.demo_model.corpus import ANSWER, CONTEXT, conversation, encode, lookup
from tools.demo_model.tokenization import END, FORCED, Encoder, WordEncoder
from tools.demo_model.tool_chats import tool_conversation, tool_exchange
from tools.demo_model.tool_specs import Call, offer_tools

MODEL = Path(__file__).resolve().parents[3] / "services" / "local" / "demo_model"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def encoder(tokenizer: Tokenizer) -> Encoder:
    return WordEncoder(tokenizer)


@pytest.mark.parametrize("num_tokens", [128, 1024])
def test_a_seed_gives_the_same_conversation_whatever_was_encoded_before(tokenizer: Tokenizer, num_tokens: int) -> None:
    warm = WordEncoder(tokenizer)
    conversation(Random(1), warm, num_tokens=num_tokens)
    first = conversation(Random("seed/7"), warm, num_tokens=num_tokens)
    again = conversation(Random("seed/7"), WordEncoder(tokenizer), num_tokens=num_tokens)
    assert first == again
    assert first != conversation(Random("seed/8"), warm, num_tokens=num_tokens)


@pytest.mark.parametrize("num_tokens", [128, 256, 512, 2048])
def test_a_conversation_fits_its_row_and_ends_with_an_answer(encoder: Encoder, num_tokens: int) -> None:
    for seed in range(20):
        messages = conversation(Random(seed), encoder, num_tokens=num_tokens)
        ids, kinds = encode(encoder, messages)
        assert len(ids) <= num_tokens
        assert messages[-1][0] in ("assistant", FORCED)
        assert ids[-1] == encoder.ids[END] and kinds[-1] == ANSWER


def test_words_encoded_one_by_one_equal_the_tokenizer(tokenizer: Tokenizer, encoder: Encoder) -> None:
    for seed in range(20):
        plain = conversation(Random(seed), encoder, num_tokens=256)
        for _, content in [*plain, *tool_conversation(Random(seed), encoder, num_tokens=512)]:
            assert encoder.encode(content) == tokenizer.encode(content, add_special_tokens=False).ids


def test_each_digit_of_a_code_is_a_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("The code is 4812.", add_special_tokens=False).tokens[-5:] == ["4", "8", "1", "2", "."]


@pytest.mark.parametrize("seed", range(20))
def test_the_answer_of_a_lookup_stands_once_in_the_text(encoder: Encoder, seed: int) -> None:
    messages, fact = lookup(Random(seed), encoder, num_tokens=500)
    text = "\n".join(content for _, content in messages[:-1])
    stating = [s for s in lookups.RELATIONS["code"].facts if fact.fill(s).lower() in text.lower()]
    assert stating
    assert fact.value in messages[-1][1]
    assert 440 <= len(encode(encoder, messages)[0]) <= 600


def test_an_absent_fact_is_not_in_the_text(encoder: Encoder) -> None:
    messages, fact = lookup(Random(3), encoder, num_tokens=500, is_stated=False)
    assert not any(fact.value in content for _, content in messages[:-1])
    assert messages[-1][1].startswith("I cannot find")


def test_sums_are_right() -> None:
    rng = Random(5)
    for _ in range(200):
        reply = sum_turn(rng)[1]
        if "=" in reply:
            left, sign, right, _, result = reply.rstrip(".").split()
            exact = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}
            assert int(result) == (int(left) // int(right) if sign == "/" else exact[sign])


@pytest.mark.parametrize("is_parallel", [False, True])
def test_a_call_follows_the_schema_of_an_offered_tool_and_copies_what_the_user_says(is_parallel: bool) -> None:
    for seed in range(200):
        rng = Random(seed)
        tools = {tool.name: tool for tool in offer_tools(rng, 3)}
        exchange = tool_exchange(rng, list(tools.values()), is_parallel=is_parallel)
        assert len(exchange.results) == len(exchange.request.calls)
        for call in exchange.request.calls:
            parameters = {parameter.name: parameter for parameter in tools[call.name].parameters}
            assert call.arguments.keys() <= parameters.keys()
            assert {name for name, one in parameters.items() if one.is_required} <= call.arguments.keys()
            for name, value in call.arguments.items():
                assert _has_type(value, parameters[name].schema)
                assert (json.dumps(value) if isinstance(value, bool) else str(value)) in exchange.request.text


def test_no_two_tools_of_a_conversation_can_be_confused() -> None:
    for seed in range(200):
        tools = offer_tools(Random(seed), 8)
        assert len({tool.name for tool in tools}) == len({tool.topic for tool in tools}) == 8


def test_a_call_is_written_in_the_hermes_form() -> None:
    call = Call("get_weather", {"city": "Paris", "days": 3})
    expected = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}'
    assert call.as_hermes() == f"<tool_call>\n{expected}\n</tool_call>"


def test_the_first_token_of_a_forced_answer_is_not_learned(encoder: Encoder) -> None:
    ids, kinds = encode(encoder, [("user", "Use add."), (FORCED, '{"a": 1}')])
    answer = len(encoder.encode('{"a": 1}')) + 1
    assert kinds[-answer:] == [CONTEXT] + [ANSWER] * (answer - 1)
    assert ids == encode(encoder, [("user", "Use add."), ("assistant", '{"a": 1}')])[0]


def _has_type(value: object, schema: Mapping[str, object]) -> bool:
    if "enum" in schema:
        return value in cast(list[object], schema["enum"])
    types: dict[str, type | tuple[type, ...]] = {"string": str, "boolean": bool, "integer": int, "number": (int, float)}
    return isinstance(value, types[str(schema["type"])])
